"""State of a run, passed to every handler, and its clocks."""

from __future__ import annotations

import collections
import numbers
import operator
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import attrs
from torch import Tensor

from rein.loop.checks import check_runs, same
from rein.ops.trees import Read

CLOCKS = ("env_steps", "vector_steps", "updates", "episodes", "iterations", "epochs", "seconds")


def _counter(name: str) -> property:
    slot = f"_{name}"
    stored = operator.attrgetter(slot)

    def read(self: Clocks) -> int:
        value = stored(self)
        if type(value) is int:
            return value
        value = int(value)  # fetched from the device once, then kept
        setattr(self, slot, value)
        return value

    def write(self: Clocks, value: int | Tensor) -> None:
        setattr(self, slot, value)

    return property(read, write, doc=f"The {name} so far; may be set to an int or to a 0-d tensor, reads as an int.")


class Clocks:
    """Counters of a run, used by schedules, filters, stop rules, log lines and file names.

    Parts advance `env_steps`, `vector_steps`, `updates` and `episodes`. The loop advances `iterations`, `epochs` and
    `seconds` (running time, summed over resumes). Reading a counter that holds a tensor fetches it from its device.
    """

    __slots__ = ("_env_steps", "_episodes", "_resumed_at", "_seconds", "_state", "_updates", "_vector_steps")

    env_steps = _counter("env_steps")
    vector_steps = _counter("vector_steps")
    updates = _counter("updates")
    episodes = _counter("episodes")

    def __init__(self, state: Any) -> None:
        """Create clocks for `state`, the run's `State`, which counts iterations and epochs."""
        self._state = state
        self._env_steps: int | Tensor = 0
        self._vector_steps: int | Tensor = 0
        self._updates: int | Tensor = 0
        self._episodes: int | Tensor = 0
        self._seconds = 0.0
        self._resumed_at: float | None = None

    def reads(self) -> Iterator[Read]:
        """Yield the counters that hold tensors, so that they are read together with others."""
        for slot in (f"_{name}" for name in CLOCKS[:4]):
            if isinstance(value := getattr(self, slot), Tensor):
                yield [value], lambda copy, slot=slot: setattr(self, slot, int(copy))

    def advance(self, **amounts: int | Tensor) -> None:
        """Add to clocks by name. Adding a tensor does not fetch it."""
        for name, amount in amounts.items():
            if name not in CLOCKS[:4]:
                raise ValueError(
                    f"clocks.advance({name}=...): unknown clock; a part can advance {', '.join(CLOCKS[:4])}"
                )
            setattr(self, f"_{name}", getattr(self, f"_{name}") + amount)

    @property
    def iterations(self) -> int:
        """Finished iterations of the whole run."""
        return self._state._total_iterations

    @property
    def epochs(self) -> int:
        """Finished epochs of the whole run, including halted ones."""
        return self._state._epochs_ended

    @property
    def seconds(self) -> float:
        """Wall-clock seconds that the loop has been running, summed over resumes."""
        running = 0.0 if self._resumed_at is None else time.perf_counter() - self._resumed_at
        return self._seconds + running

    def start(self) -> None:
        """Resume counting `seconds` at the start of a run."""
        self._resumed_at = time.perf_counter()

    def stop(self) -> None:
        """Stop counting `seconds` at the end of a run."""
        self._seconds, self._resumed_at = self.seconds, None

    def as_dict(self) -> dict[str, float]:
        """Return all clocks by name."""
        return {name: getattr(self, name) for name in CLOCKS}

    def state_dict(self) -> dict[str, Any]:
        """Return the clocks as numbers, without `iterations` and `epochs`, which are in the state of the loop."""
        return {name: getattr(self, name) for name in (*CLOCKS[:4], "seconds")}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the clocks from the result of `state_dict`."""
        for name in CLOCKS[:4]:
            setattr(self, f"_{name}", int(state[name]))
        self._seconds = float(state["seconds"])

    def __repr__(self) -> str:
        return f"Clocks({', '.join(f'{name}={value}' for name, value in self.as_dict().items())})"


class EpochRecord(NamedTuple):
    """Record of a finished epoch in `State.history`."""

    epoch: int
    status: str  # "completed" or "halted"
    iterations: int
    seconds: float
    metrics: Mapping[str, float]


Handler = Callable[["State"], None]


HALT_EPOCH, HALT_LOOP, INTERRUPT = range(3)  # halts, in order of strength


@attrs.define(eq=False, repr=False)
class State:
    """Mutable state of a run, passed to every handler.

    Counters are updated by the loop and are read-only here. A handler can assign `step_state`, entries of `metrics` and
    entries of `memory`, and can call `halt_epoch()`, `halt_loop(reason)`, `request(action)` and `log(name, value)`.

    Attributes:
        max_epochs: Total number of epochs of the run; None for no limit.
        max_iterations: Iterations per epoch; None for no limit.
        batch: Element of the data of this iteration.
        step_state: Last result of the step. Treat its contents as immutable.
        metrics: Metrics of this epoch by name. Reading an entry returns a float.
        history: Records of the last 1000 finished epochs.
        counts: Counts of events and memory of filters.
        memory: JSON values or tensors of handlers, saved with the run.
        times: Seconds by activity.
        limits: Limits of clocks that end the run, by clock name; see `stop_at`.
        status: None before a run; then "running", "completed", "halted" or "failed".
        clocks: Counters of the run.
    """

    max_epochs: int | None = None
    max_iterations: int | None = None
    batch: Any = None
    step_state: Any = None
    metrics: MutableMapping[str, Any] = attrs.field(factory=dict)
    history: collections.deque[EpochRecord] = attrs.field(factory=lambda: collections.deque(maxlen=1000))
    counts: dict[str, Any] = attrs.field(factory=dict)
    memory: dict[str, Any] = attrs.field(factory=dict)
    times: dict[str, float] = attrs.field(factory=dict)
    limits: dict[str, float] = attrs.field(factory=dict)
    status: str | None = None
    clocks: Clocks = attrs.field(init=False, default=attrs.Factory(Clocks, takes_self=True))
    _epoch: int = 0
    _iteration: int = 0
    _total_iterations: int = 0
    _epochs_ended: int = 0
    _epoch_open: bool = False
    _epoch_status: str | None = None
    _halts: dict[int, str | None] = attrs.field(factory=dict)  # halts requested in this run, with their reasons
    _postponed: dict[str, Any] | None = None  # firing that an interrupt cut short; the next run finishes it
    _stopped: bool = False  # whether a halt of the loop was requested since the latest evaluation began
    _evaluation: Any = None  # set while an event of an evaluation fires
    _left: bool = False  # if True, evaluations of this run end early and no new one begins
    _requests: list[Callable[[State], None]] = attrs.field(factory=list)
    _read_episodes: Callable[[], list[Any]] | None = None  # set while `episodes_completed` fires
    _read_trajectory: Callable[[], Any] | None = None  # set while `epoch_ended` fires, if the loop has a store
    _saved_checkpoint: Path | None = None  # set while `checkpoint_saved` fires
    _receivers: list[Callable[[str, Any], None]] = attrs.field(factory=list)  # of `log`, one per attached logger

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if name in CLOCKS:
                raise AttributeError(f"a state has no {name}; use state.clocks.{name}")
            raise AttributeError(f"'State' object has no attribute {name!r}")

    def __repr__(self) -> str:
        return f"State({self.status}, epoch={self.epoch}, iteration={self.iteration}, {self.clocks!r})"

    @property
    def epoch(self) -> int:
        """Current epoch, starting at 1 (or `first_epoch`); 0 before a run. Still k in the end events of epoch k."""
        return self._epoch

    @property
    def iteration(self) -> int:
        """Finished iterations of this epoch: 0 at the first `iteration_started`, 1 after the first iteration."""
        return self._iteration

    @property
    def total_iterations(self) -> int:
        """Finished iterations of the whole run."""
        return self._total_iterations

    @property
    def epoch_open(self) -> bool:
        """Whether an epoch has started and not ended. An interrupt or an exception leaves it open."""
        return self._epoch_open

    @property
    def epoch_status(self) -> str | None:
        """Status of the ending epoch, "completed" or "halted"; None before its end."""
        return self._epoch_status

    @property
    def remaining(self) -> float:
        """Fraction of the run that remains, from 1 to 0: the smallest over epochs and `limits`; NaN without either."""
        left = [1.0 - getattr(self.clocks, clock) / limit for clock, limit in self.limits.items()]
        if self.max_epochs is not None:  # in its end events, an open epoch is already counted
            part = 0.0 if self._epochs_ended == self._epoch else self._iteration / (self.max_iterations or float("inf"))
            left.append(1.0 - (self._epochs_ended + part) / self.max_epochs)
        return max(0.0, min(left)) if left else float("nan")

    @property
    def reason(self) -> str | None:
        """Why the run ends: the first reason given for the strongest halt, or None."""
        reasons = {halt: reason for halt, reason in tuple(self._halts.items()) if reason is not None}
        return reasons[max(reasons)] if reasons else None

    halts = property(
        lambda self: frozenset(self._halts), doc="Requested halts: `HALT_EPOCH`, `HALT_LOOP` and `INTERRUPT`."
    )

    @property
    def episodes_completed(self) -> list[Any]:
        """Episodes that ended in this step, in handlers of the event `episodes_completed`; otherwise empty."""
        return [] if self._read_episodes is None else self._read_episodes()

    @property
    def trajectory(self) -> Any:
        """The ending epoch, a `rein.Trajectory`, in handlers of `epoch_ended` of a training loop with a store.

        Its tensors are views that must not be changed and that the next epoch overwrites. Raises RuntimeError in other
        events and without a store.
        """
        if self._read_trajectory is None:
            raise RuntimeError(
                "state.trajectory: no trajectory is available; read it in a handler of epoch_ended, in a training loop "
                "with a store such as rein.MemoryStore()"
            )
        return self._read_trajectory()

    @property
    def saved_checkpoint(self) -> Path | None:
        """Path of the new checkpoint, in handlers of the event `checkpoint_saved`; otherwise None."""
        return self._saved_checkpoint

    @property
    def evaluation(self) -> Any:
        """`rein.episodes.EvaluationEvent` in handlers of `evaluation_started`, `evaluation_episode_completed` and
        `evaluation_completed`; otherwise None.
        """
        return self._evaluation

    def halt_epoch(self) -> None:
        """End this epoch early, as halted. The next epoch follows."""
        self._request_halt(HALT_EPOCH, None)

    def halt_loop(self, reason: str | None = None) -> None:
        """End the run. The open epoch ends first, as halted."""
        self._request_halt(HALT_LOOP, reason)

    def log(self, name: str, value: Any) -> None:
        """Assign a number to `metrics`, or pass an image, a video, a histogram or a text to the attached loggers.

        Example::

            state.log("largest_reward", 3.0)
            state.log("weights/actor", Histogram(agent.networks.actor[0].weight))

        `value` is a number or a tensor with one element, a string, or a `Histogram`, an `Image` or a `Video` of
        `rein.handlers.loggers`. A value of another type raises TypeError if a logger is attached. Without loggers,
        only numbers are kept.
        """
        if isinstance(value, numbers.Real) or (isinstance(value, Tensor) and value.numel() == 1):
            self.metrics[name] = value
            return
        for receive in self._receivers:
            receive(name, value)

    def request(self, action: Callable[[State], None]) -> None:
        """Call `action(state)` once at the next edge, after all handlers. Use this to take a checkpoint.

        Edges follow `iteration_completed`, `epoch_ended` and the final event. Requesting the same action twice calls it
        once. Raises TypeError if `action` is not callable, is asynchronous or is a generator function.
        """
        if not any(same(action, pending) for pending in self._requests):
            check_runs("state.request(...)", "callback", action)
            self._requests.append(action)

    def _request_halt(self, halt: int, reason: str | None, final: bool = False) -> None:
        if self.status == "running":
            # plain assignments instead of a lock: the call may come from any thread or from a signal handler
            if self._halts.get(halt) is None:
                self._halts[halt] = reason
            self._stopped = self._stopped or halt == HALT_LOOP
        elif final:  # the final event is firing and may contain an evaluation
            self._left = True
        else:
            ended = f"in `{self.status}` or later is ignored: the run has ended"
            when = ended if self.status else "before a run is ignored"
            warnings.warn(f"a halt requested {when}", RuntimeWarning, stacklevel=3)

    @property
    def _halt_requested(self) -> bool:
        """Whether a halt of the epoch or the loop was requested. An interrupt does not count."""
        return HALT_EPOCH in self._halts or HALT_LOOP in self._halts
