"""Measure seconds per phase of an iteration, and rates."""

from __future__ import annotations

import time

from rein.handlers.output import rate
from rein.loop import Loop
from rein.loop.state import Handler, State

_UNTIMED = ("started", "epoch_completed", "epoch_halted", "epoch_ended", "completed", "halted", "failed")
_BEGAN = "timing/began"  # key of state.memory: clocks at the start of the epoch
_CLOCKS = ("env_steps", "updates")


def timing(loop: Loop, *, phases: bool = False) -> None:
    """Sum the seconds between events of an iteration over each epoch, in `state.times[<event>]`.

    A phase ends when the handlers of its event have run. The phase `iteration_started` includes fetching the batch. The
    end events of the epoch also provide `state.times["epoch"]` and the metrics `iterations_per_second`,
    `env_steps_per_second` and `updates_per_second`, which are NaN if the epoch took no measurable time. Times are
    measured on the host, without synchronizing with a GPU. Events defined during a run are timed from the next run on.
    `phases` also provides the seconds of each phase as the metrics `seconds_<event>`.

    Raises ValueError if the loop is already timed.
    """
    if any(isinstance(getattr(handler, "__self__", None), _Stopwatch) for handler in loop.started.handlers):
        raise ValueError("timing(loop): the loop is already timed; attach timing once")
    watch = _Stopwatch(loop, phases)
    loop.started.attach(watch.start)
    loop.on("epoch_completed", "epoch_halted")(watch.report)  # before handlers of epoch_ended read it


class _Stopwatch:
    """Time of the last event, and the timed events."""

    def __init__(self, loop: Loop, phases: bool) -> None:
        self._loop, self._phases = loop, phases
        self._attached: set[str] = set(_UNTIMED)
        self._last = 0.0

    def start(self, state: State) -> None:
        """Attach to all events that the loop has now, after their handlers. Handler of `started`."""
        for name, event in self._loop.events.items():
            if name not in self._attached:
                self._attached.add(name)
                event.attach(self.begin_epoch if name == "epoch_started" else self._phase(name))
        self._last = time.perf_counter()  # a run may start in the middle of an epoch

    def _phase(self, name: str) -> Handler:
        def time_phase(state: State) -> None:
            last, self._last = self._last, time.perf_counter()
            state.times[name] = state.times.get(name, 0.0) + self._last - last

        return time_phase

    def begin_epoch(self, state: State) -> None:
        """Store the clocks at the start of the epoch."""
        state.memory[_BEGAN] = {name: getattr(state.clocks, name) for name in _CLOCKS}
        self._last = time.perf_counter()

    def report(self, state: State) -> None:
        """Set the rates of the epoch. Those of env_steps and updates are missing if timing was attached within it."""
        seconds = state.times["epoch"]
        state.metrics["iterations_per_second"] = rate(state.iteration, seconds)
        for name, began in state.memory.pop(_BEGAN, {}).items():
            state.metrics[f"{name}_per_second"] = rate(getattr(state.clocks, name) - began, seconds)
        if self._phases:
            state.metrics.update({f"seconds_{name}": spent for name, spent in state.times.items() if name != "epoch"})
