"""Save checkpoints of a run when an event fires and when the run ends."""

from __future__ import annotations

import collections
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import attrs

from rein.errors import CheckpointError, text_of
from rein.loop import Loop
from rein.loop.events import Event
from rein.loop.saving import unowned
from rein.loop.state import State
from rein.networks.finite_parameters import check_parameters
from rein.ops.parallel import rank
from rein.replay.storage import without_rows

logger = logging.getLogger("rein")


def checkpoint(
    loop: Loop,
    store: Any = None,
    *,
    event: str = "epoch_ended",
    keep_last: int | None = 3,
    keep_best: tuple[str, Literal["min", "max"]] | None = None,
    keep_every: int | None = None,
    name: Callable[[State], str] | None = None,
    on_failure: Literal["raise", "warn"] = "raise",
    **filters: Any,
) -> Saver:
    """Save the state of the loop and all of its parts when `event` fires, and when a run ends without failure.

    Example::

        rein.checkpoint(loop, every=10, keep_last=3, keep_best=("evaluation_return", "max"))

    Attach it after the other handlers. A checkpoint is taken at the next edge: after all handlers, at the end of an
    iteration, an epoch or the run. Trajectories are flushed, the state is copied, and a thread writes the copy while
    training continues.

    When a file is safe on the disk, the event `checkpoint_saved` fires at the next edge, or at the end of the run. Its
    path is then `state.saved_checkpoint`.

    A file is kept if any rule keeps it: `keep_last`, `keep_every`, `keep_best`. The newest checkpoint without NaN or
    infinity is always kept. Several handlers may share a store; each rule then applies to the checkpoints of all of
    them.

    Args:
        loop: Loop to save.
        store: `HDF5Store`, whose run folder receives the checkpoints, or `rein.Checkpoints(folder)`. Default: the store
            of the training loop.
        event: Name of the event.
        keep_last: Number of newest checkpoints to keep. None keeps all.
        keep_best: Metric and "min" or "max". The checkpoint with the best value is kept in `best/`. Checkpoints at the
            end of an epoch are always compared. Within an epoch, a checkpoint is compared only if its iteration
            assigned the metric; use `event="evaluation_completed"` to compare every evaluation.
        keep_every: Keep a checkpoint after each `keep_every` epochs.
        name: Function of the state that returns a file name to use instead of `epoch-000100`.
        on_failure: "raise" ends the run if a write fails, "warn" logs the error.
        **filters: Filters of the event, such as `every=10`.

    Returns:
        A saver. `saver.ask()` takes a checkpoint at the next edge.

    Raises:
        ValueError: If a rule is invalid.
        TypeError: If `store` cannot keep checkpoints.
        CheckpointError: At the first checkpoint, if a handler or the step uses an object with state that the loop does
            not own.
    """
    store = loop.parts.get("store") if store is None else store
    if store is None:
        raise TypeError("checkpoint(loop): the loop has no store; pass an HDF5Store or rein.Checkpoints(folder)")
    checkpoints = getattr(store, "checkpoints", store)
    if not hasattr(checkpoints, "take"):
        raise TypeError(f"checkpoint(loop, {type(store).__name__}): pass an HDF5Store or rein.Checkpoints(folder)")
    if on_failure not in ("raise", "warn"):
        raise ValueError(f'checkpoint(on_failure={on_failure!r}): expected "raise" or "warn"')
    for rule, number in (("keep_last", keep_last), ("keep_every", keep_every)):
        if number is not None and (not isinstance(number, int) or number < 1):
            raise ValueError(f"checkpoint({rule}={number!r}): expected an integer of at least 1, or None")
    if keep_best is not None and (len(keep_best) != 2 or keep_best[1] not in ("min", "max")):
        raise ValueError(f'checkpoint(keep_best={keep_best!r}): expected (metric, "min") or (metric, "max")')
    best = None if keep_best is None else (keep_best[0], keep_best[1])
    if best is not None:
        loop.metrics.read_by(f"checkpoint(keep_best={best!r})", best[0])
    rules = {"last": keep_last, "every": keep_every, "best": best}
    attach = loop.event(event)(**filters)
    shared = checkpoints.shared.setdefault(loop, _Shared())
    shared.rules.append(rules)
    saved = loop.events.get("checkpoint_saved") or loop.define("checkpoint_saved")
    saver = Saver(loop, checkpoints, rules, shared, name, on_failure, saved)
    loop.started.attach(saver.begin)
    loop.iteration_completed.wire(saver.request_announcement)
    attach(saver.save_at_next_edge)
    loop.epoch_ended.attach(saver.save_if_wanted)
    loop.on("completed", "halted", "failed")(saver.finish)
    return saver


MOST_REPLAY = 2 << 30  # bytes of the replays that `save_at_end` saves


def save_at_end(loop: Loop, checkpoints: Any) -> None:
    """Save the state when a run ends without failure or is interrupted. `training_loop` attaches it to its store.

    `checkpoint` replaces it if it saves to the same folder. The file replaces that of the last run of the loop. Larger
    replays than `MOST_REPLAY` are left out. If the state cannot be saved, or if a parameter is not finite, a warning is
    logged, because the run has succeeded. Of data-parallel processes, only the first one saves.
    """
    begins: tuple[int, int] | None = None

    def is_due() -> bool:
        return rank() == 0 and loop not in checkpoints.shared

    @loop.started.wire
    def begin(state: State) -> None:
        nonlocal begins
        begins = state.total_iterations, state.clocks.epochs
        if is_due():
            checkpoints.begin(loop)

    def save(state: State) -> None:
        try:
            for part in loop.parts.values():
                check_parameters(part, "An earlier checkpoint is kept, if there is one")
                if callable(flush := getattr(part, "flush", None)):
                    flush()
            whole = loop.state_dict()
            lighter, size = without_rows(whole)
            omitted = unowned(loop)
            if is_large := size > MOST_REPLAY:
                omitted.append(f"the replay of {size / 2**30:.2g} GiB, which learning_starts env steps fill again")
                logger.warning(
                    "the run is saved without its replay, which has %.2g GiB. To save it too, call "
                    "rein.checkpoint(loop) before the run",
                    size / 2**30,
                )
            checkpoints.take(loop, (), state=lighter if is_large else whole, omitted=omitted)
            checkpoints.close()
        except Exception as error:  # parts of the user may raise anything
            logger.warning("the state at the end of the run was not saved: %s", text_of(error))

    @loop.completed.wire
    @loop.halted.wire
    def request(state: State) -> None:
        if is_due() and begins != (state.total_iterations, state.clocks.epochs):
            state.request(save)


class _Shared:
    """State shared by the checkpoint handlers of one loop and one store."""

    def __init__(self) -> None:
        self.rules: list[dict[str, Any]] = []  # one per handler
        self.begin()

    def begin(self) -> None:
        """Reset at the start of a run."""
        self.judged: set[str] = set()  # metrics by which checkpoints were compared
        self.place: tuple[Any, ...] | None = None  # position of the last checkpoint
        self.taken: set[Any] = set()  # kinds of checkpoints taken at this position


@attrs.define(eq=False, slots=False)
class Saver:
    """Takes the checkpoints of a loop."""

    _loop: Loop
    checkpoints: Any
    _rules: dict[str, Any]
    _shared: _Shared
    _name: Callable[[State], str] | None
    _on_failure: str
    _event: Event
    # checkpoints that are not announced; the writer's thread appends
    _saved: collections.deque[Path] = attrs.field(factory=collections.deque, init=False)
    _wanted: bool = attrs.field(default=False, init=False)  # at the end of this epoch
    _wanted_within: bool = attrs.field(default=False, init=False)  # whether an event within an epoch requested one
    _checked: bool = attrs.field(default=False, init=False)

    def ask(self) -> None:
        """Take a checkpoint at the next edge. Callable from any thread or signal handler. Does nothing before a run."""
        if self._loop.running:
            self._loop.state.request(self.take)

    def begin(self, state: State) -> None:
        """Move newer checkpoints of another run in the same folder aside. Handler of `started`."""
        self._wanted = self._wanted_within = False
        self._saved.clear()
        self._shared.begin()
        self.checkpoints.begin(self._loop)

    def save_at_next_edge(self, state: State) -> None:
        """Request a checkpoint at the next edge, or at the edge after the end of the epoch. Handler of the event."""
        if state.epoch_status is None or not state.epoch_open:
            self._wanted_within |= state.epoch_open
            state.request(self.take)
        else:
            self._wanted = True

    def save_if_wanted(self, state: State) -> None:
        """Request the checkpoint of an event at the epoch's end, and raise write errors. Handler of `epoch_ended`."""
        if self._on_failure == "raise":
            self.checkpoints.check()
        if self._wanted:
            self._wanted = False
            state.request(self.take)

    def finish(self, state: State) -> None:
        """Take a last checkpoint unless the run failed, and wait for all writes. Handler of the final events."""
        if state.status != "failed":
            state.request(self.take)
        state.request(self.close)
        if self._rules["best"] is not None:
            self._warn_of_best(state, self._rules["best"])

    def _warn_of_best(self, state: State, best: tuple[str, str]) -> None:
        """Warn if no checkpoint could be the best one, or only the one at the end of the run."""
        metrics = {name for record in state.history for name in record.metrics} | set(state.metrics)
        if metrics and best[0] not in metrics:
            logger.warning("checkpoint(keep_best=%r): no epoch had this metric, so no best checkpoint is kept", best)
        elif metrics and self._wanted_within and best[0] not in self._shared.judged:
            logger.warning(
                "checkpoint(keep_best=%r): only the checkpoint at the end of the run was compared. Within an epoch, a "
                "checkpoint is compared if its iteration assigned the metric: for example, use "
                "event='evaluation_completed'",
                best,
            )

    def take(self, state: State) -> None:
        """Save the run, at most once for each position. Runs at an edge."""
        shared = self._shared
        judged = [{**rules, "best": self._judged(state, rules["best"])} for rules in shared.rules]
        shared.judged |= {rules["best"][0] for rules in judged if rules["best"] is not None}
        place, kind = self._place(state), (self._name, self._on_failure)
        if place != shared.place:
            shared.place, shared.taken = place, set()
        if kind in shared.taken:
            return
        self._check_owned()
        for part in self._loop.parts.values():  # a checkpoint must not refer to data that is not on disk
            if callable(flush := getattr(part, "flush", None)):
                flush()
        stem = self._name(state) if self._name is not None else None
        if self._name is not None and not isinstance(stem, str):
            raise TypeError(f"checkpoint(name=...): the function returned {stem!r:.80}; it must return a string")
        self.checkpoints.take(self._loop, judged, stem, self._on_failure, self._saved.append)
        shared.taken.add(kind)

    def _judged(self, state: State, best: tuple[str, str] | None) -> tuple[str, str] | None:
        """Return `best` if its metric describes the current state."""
        fresh = best is not None and (not state.epoch_open or best[0] in self._loop.metrics.just_assigned)
        return best if fresh else None

    def _place(self, state: State) -> tuple[Any, ...]:
        """Return the position of the run, with the metrics of `keep_best`, which the final event may assign again."""
        evaluations = state.memory.get("evaluations", {}).get("number", 0)
        best = [rules["best"] for rules in self._shared.rules if rules["best"] is not None]
        values = [repr(state.metrics.get(metric)) for metric, _ in best]
        return state.total_iterations, state.clocks.epochs, state.epoch_open, evaluations, *values

    def close(self, state: State) -> None:
        """Wait until all checkpoints are written. Runs at an edge."""
        self.checkpoints.close()
        self.announce(state)

    def request_announcement(self, state: State) -> None:
        """Request the events of new files. Wired to `iteration_completed`."""
        if self._saved:
            state.request(self.announce)

    def announce(self, state: State) -> None:
        """Fire `checkpoint_saved` for each new file that still exists. Runs at an edge."""
        while self._saved:
            path = self._saved.popleft()
            if self._event.listened_to and path.exists():
                state._saved_checkpoint = path
                try:
                    self._event.fire(state)
                finally:
                    state._saved_checkpoint = None

    def _check_owned(self) -> None:
        if self._checked:
            return
        if objects := unowned(self._loop):
            raise CheckpointError(
                f"a checkpoint would not contain {'; '.join(objects)}: add each to the loop with loop.own(name, part), "
                "or remove its state_dict"
            )
        self._checked = True
