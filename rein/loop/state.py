"""State of a run: the record that every handler receives."""

from __future__ import annotations

import collections
import warnings
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, NamedTuple

import attrs

from rein.loop.checks import check_runs, same
from rein.loop.clocks import Clocks


class EpochRecord(NamedTuple):
    """What `State.history` keeps of a finished epoch."""

    epoch: int
    status: str  # "completed" or "halted"
    iterations: int
    seconds: float
    metrics: Mapping[str, float]


Handler = Callable[["State"], None]


HALT_EPOCH, HALT_LOOP, INTERRUPT = range(3)  # what a run may be asked for, by strength


@attrs.define(eq=False, repr=False)
class State:
    """The one mutable record of a run, given to every handler.

    Counters belong to the loop and are read-only here. A handler may assign `step_state`, entries of `metrics` and
    entries of `memory`, and may ask: `halt_epoch()`, `halt_loop(reason)`, `request(action)`.
    """

    max_epochs: int | None = None
    max_iterations: int | None = None
    batch: Any = None  # the element of `data` of this iteration
    step_state: Any = None  # what the step returned last; immutable inside, so "before" and "after" never alias
    metrics: MutableMapping[str, Any] = attrs.field(factory=dict)  # this epoch's; reading one gives a float
    history: collections.deque[EpochRecord] = attrs.field(factory=lambda: collections.deque(maxlen=1000))
    counts: dict[str, Any] = attrs.field(factory=dict)  # what events and filters must remember
    memory: dict[str, Any] = attrs.field(factory=dict)  # a handler's own JSON or tensors, checkpointed
    times: dict[str, float] = attrs.field(factory=dict)  # seconds, by what took them
    limits: dict[str, float] = attrs.field(factory=dict)  # by clock, where a rule will end the run; see `stop_at`
    status: str | None = None  # None before a run; then "running", "completed", "halted" or "failed"
    clocks: Clocks = attrs.field(init=False, default=attrs.Factory(Clocks, takes_self=True))
    _epoch: int = 0
    _iteration: int = 0
    _total_iterations: int = 0
    _epochs_ended: int = 0
    _epoch_open: bool = False
    _epoch_status: str | None = None
    _halts: dict[int, str | None] = attrs.field(factory=dict)  # what was asked for in this run, each with its reason
    _postponed: dict[str, Any] | None = None  # the firing that an interrupt cut short, which the next run finishes
    _stopped: bool = False  # whether the end of the loop was requested since the latest evaluation began
    _left: bool = False  # True: evaluations of this run end early and no other one begins
    _requests: list[Callable[[State], None]] = attrs.field(factory=list)
    _read_episodes: Callable[[], list[Any]] | None = None  # set while `episodes_completed` fires

    def __repr__(self) -> str:
        return f"State({self.status}, epoch={self.epoch}, iteration={self.iteration}, {self.clocks!r})"

    @property
    def epoch(self) -> int:
        """The current epoch, 1-based; 0 before the first. Still k in epoch k's end events."""
        return self._epoch

    @property
    def iteration(self) -> int:
        """Finished iterations of this epoch: 0 at its first `iteration_started`, 1 when that is completed."""
        return self._iteration

    @property
    def total_iterations(self) -> int:
        """Finished iterations of the whole run."""
        return self._total_iterations

    @property
    def epoch_open(self) -> bool:
        """Whether an epoch has started and not ended (an interrupt or a failure leaves it open)."""
        return self._epoch_open

    @property
    def epoch_status(self) -> str | None:
        """How this epoch ends, "completed" or "halted"; None until it does."""
        return self._epoch_status

    @property
    def remaining(self) -> float:
        """The fraction still to do, 1 to 0: of the run's epochs or of `limits`, whichever is less; NaN without both."""
        left = [1.0 - getattr(self.clocks, clock) / limit for clock, limit in self.limits.items()]
        if self.max_epochs is not None:  # in an epoch's end events it is open, and counted already
            part = 0.0 if self._epochs_ended == self._epoch else self._iteration / (self.max_iterations or float("inf"))
            left.append(1.0 - (self._epochs_ended + part) / self.max_epochs)
        return max(0.0, min(left)) if left else float("nan")

    @property
    def reason(self) -> str | None:
        """Why the run is to end, if somebody said: the first reason given for the strongest halt."""
        given = {halt: reason for halt, reason in tuple(self._halts.items()) if reason is not None}
        return given[max(given)] if given else None

    halts = property(lambda self: frozenset(self._halts), doc="Which of the `HALT_...` and `INTERRUPT` were asked for.")

    @property
    def episodes_completed(self) -> list[Any]:
        """The episodes that ended in this step, in a handler of the event `episodes_completed`; empty elsewhere."""
        return [] if self._read_episodes is None else self._read_episodes()

    def halt_epoch(self) -> None:
        """End this epoch early; it ends as halted, and the next one follows."""
        self._ask(HALT_EPOCH, None)

    def halt_loop(self, reason: str | None = None) -> None:
        """End the run; the open epoch ends as halted first."""
        self._ask(HALT_LOOP, reason)

    def request(self, action: Callable[[State], None]) -> None:
        """Have `action(state)` called at the next edge, when all handlers have run: the place to take a checkpoint.

        Edges are after `iteration_completed`, `epoch_ended` and the final event. The same action is taken once there.
        Raises TypeError for what is no function, or does nothing when it is called.
        """
        if not any(same(action, asked) for asked in self._requests):
            check_runs("state.request(...)", "callback", action)
            self._requests.append(action)

    def _ask(self, halt: int, reason: str | None, final: bool = False) -> None:
        if self.status == "running":
            # assignments and no lock: it may come from any thread, or from a signal in the middle of another
            if self._halts.get(halt) is None:
                self._halts[halt] = reason
            self._stopped = self._stopped or halt == HALT_LOOP
        elif final:  # the final event is firing, and may contain an evaluation
            self._left = True
        else:
            ended = f"in `{self.status}` or later is ignored: the run has ended"
            when = ended if self.status else "before a run is ignored"
            warnings.warn(f"a halt asked for {when}", RuntimeWarning, stacklevel=3)

    @property
    def _cut(self) -> bool:
        """Whether the open epoch is to end as halted; an interrupt does not take that back, and asks for none."""
        return HALT_EPOCH in self._halts or HALT_LOOP in self._halts
