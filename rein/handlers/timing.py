"""Where the time goes: seconds by phase of the iteration, and rates."""

from __future__ import annotations

import time

from rein.loop import Loop
from rein.loop.state import Handler, State

_UNTIMED = ("started", "epoch_completed", "epoch_halted", "epoch_ended", "completed", "halted", "failed")
_BEGAN = "timing/env_steps"  # in state.memory: the clock when the epoch began


def timing(loop: Loop) -> None:
    """Sum up, over each epoch, the seconds from event to event inside an iteration: `state.times[event's name]`.

    A phase ends when the event that closes it has run its handlers; that of `iteration_started` includes fetching the
    batch. The epoch's end events find `state.times["epoch"]` and, as metrics, `iterations_per_second` and
    `env_steps_per_second`. These are seconds of the host: what it has sent to a GPU may still be running there. Events
    defined during a run are timed from the next run on.

    Raises ValueError where the loop is timed already.
    """
    if any(isinstance(getattr(handler, "__self__", None), _Stopwatch) for handler in loop.started.handlers):
        raise ValueError("timing(loop): the loop is timed already")
    watch = _Stopwatch(loop)
    loop.started.attach(watch.start)
    loop.on("epoch_completed", "epoch_halted")(watch.report)  # before any handler of epoch_ended reads it


class _Stopwatch:
    """The moment of the last event, and the events that are timed."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._attached: set[str] = set(_UNTIMED)
        self._last = 0.0

    def start(self, state: State) -> None:
        """Attach to every event that the loop has by now, behind the handlers that it has by now."""
        for name, event in self._loop.events.items():
            if name not in self._attached:
                self._attached.add(name)
                event.attach(self.begin_epoch if name == "epoch_started" else self._phase(name))
        self._last = time.perf_counter()  # a run may begin in the middle of an epoch

    def _phase(self, name: str) -> Handler:
        def time_phase(state: State) -> None:
            last, self._last = self._last, time.perf_counter()
            state.times[name] = state.times.get(name, 0.0) + self._last - last

        return time_phase

    def begin_epoch(self, state: State) -> None:
        """Remember where the epoch began."""
        state.memory[_BEGAN] = state.clocks.env_steps
        self._last = time.perf_counter()

    def report(self, state: State) -> None:
        """Set the epoch's rates; that of env_steps not where timing was attached in the middle of it."""
        seconds = state.times["epoch"]
        state.metrics["iterations_per_second"] = state.iteration / seconds
        if _BEGAN in state.memory:
            state.metrics["env_steps_per_second"] = (state.clocks.env_steps - state.memory.pop(_BEGAN)) / seconds
