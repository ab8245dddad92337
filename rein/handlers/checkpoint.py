"""Save the run on any event, by any filter; at the end of a run, too."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Literal

from rein.errors import CheckpointError
from rein.loop import Loop
from rein.loop.state import State
from rein.loop.unowned import unowned

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
    """Save the state of the loop and of every part that it owns when `event` fires, and when a run ends unfailed.

        rein.checkpoint(loop, every=10, keep_last=3, keep_best=("evaluation_return", "max"))

    `store` is an `HDF5Store`, whose run folder takes the checkpoints, or a `rein.Checkpoints(folder)`. By default it is
    the store of the training loop. Attach it after
    the other plug-ins. The loop takes a checkpoint at the next edge, when all handlers have run: trajectories are
    flushed, the state is copied, and a thread writes it while training goes on.

    The newest `keep_last` checkpoints stay (None keeps all), and so do those after each `keep_every` epochs and the
    newest one without NaN or infinity. `keep_best` keeps the one with the best value of a metric in `best/`. It judges
    checkpoints at an epoch's end, and within an epoch those of an iteration that assigned the metric:
    `event="evaluated"` judges every evaluation.
    Several handlers may share a store. Each rule then applies to the checkpoints of all of them, and a file stays if
    any rule keeps it.

    `name(state)` returns another name than `epoch-000100`. A failed write ends the run, or is logged with
    `on_failure="warn"`. The returned saver takes a checkpoint at the next edge when its `ask()` is called.

    Raises ValueError for invalid rules, and TypeError if `store` does not keep files. Raises CheckpointError at the
    first checkpoint if a handler or the step uses an object with a state that the loop does not own.
    """
    store = loop.parts.get("store") if store is None else store
    if store is None:
        raise TypeError("checkpoint(loop): the loop has no store; give one, or a rein.Checkpoints(folder)")
    checkpoints = getattr(store, "checkpoints", store)
    if not hasattr(checkpoints, "take"):
        raise TypeError(f"checkpoint(loop, {type(store).__name__}): give an HDF5Store or a rein.Checkpoints(folder)")
    if on_failure not in ("raise", "warn"):
        raise ValueError(f'checkpoint(on_failure={on_failure!r}): give "raise" or "warn"')
    for rule, number in (("keep_last", keep_last), ("keep_every", keep_every)):
        if number is not None and (not isinstance(number, int) or number < 1):
            raise ValueError(f"checkpoint({rule}={number!r}): give 1 or more, or None")
    if keep_best is not None and (len(keep_best) != 2 or keep_best[1] not in ("min", "max")):
        raise ValueError(f'checkpoint(keep_best={keep_best!r}): give a metric and "min" or "max"')
    best = None if keep_best is None else (keep_best[0], keep_best[1])
    rules = {"last": keep_last, "every": keep_every, "best": best}
    attach = loop.event(event)(**filters)
    shared = checkpoints.shared.setdefault(loop, _Shared())
    shared.rules.append(rules)
    saver = Saver(loop, checkpoints, rules, shared, name, on_failure)
    loop.started.attach(saver.begin)
    attach(saver.save_at_next_edge)
    loop.epoch_ended.attach(saver.save_if_wanted)
    loop.on("completed", "halted", "failed")(saver.finish)
    return saver


class _Shared:
    """What the handlers of one loop and one store have in common."""

    def __init__(self) -> None:
        self.rules: list[dict[str, Any]] = []  # one for each handler
        self.begin()

    def begin(self) -> None:
        """Forget the run before."""
        self.judged: set[str] = set()  # metrics by which a checkpoint was judged
        self.place: tuple[Any, ...] | None = None  # where the run stood when the last checkpoint was taken
        self.taken: set[Any] = set()  # the checkpoints that were taken there


class Saver:
    """Takes the checkpoints of a loop."""

    def __init__(
        self,
        loop: Loop,
        checkpoints: Any,
        rules: dict[str, Any],
        shared: _Shared,
        name: Callable[[State], str] | None,
        on_failure: str,
    ) -> None:
        self.checkpoints = checkpoints
        self._loop, self._rules, self._shared = loop, rules, shared
        self._name, self._on_failure = name, on_failure
        self._wanted = False  # at this epoch's end
        self._checked = False
        self._wanted_within = False  # whether one was asked for within an epoch

    def ask(self) -> None:
        """Take a checkpoint at the next edge; from any thread or signal handler. Before a run it does nothing."""
        if self._loop.running:
            self._loop.state.request(self.take)

    def begin(self, state: State) -> None:
        """Newer checkpoints of another run in the same folder are moved aside; a handler."""
        self._wanted = self._wanted_within = False
        self._shared.begin()
        self.checkpoints.begin(self._loop)

    def save_at_next_edge(self, state: State) -> None:
        """Have one taken at the next edge, or at the epoch's, behind whatever closes it; a handler."""
        if state.epoch_status is None or not state.epoch_open:
            self._wanted_within |= state.epoch_open
            state.request(self.take)
        else:
            self._wanted = True

    def save_if_wanted(self, state: State) -> None:
        """Ask at `epoch_ended` for what an event of the epoch's end wanted; surface failed writes; a handler."""
        if self._on_failure == "raise":
            self.checkpoints.check()
        if self._wanted:
            self._wanted = False
            state.request(self.take)

    def finish(self, state: State) -> None:
        """At a run's end take one where it stands, unless it failed, and see all of them safe; a handler."""
        if state.status != "failed":
            state.request(self.take)
        state.request(self.close)
        if self._rules["best"] is not None:
            self._warn_of_best(state, self._rules["best"])

    def _warn_of_best(self, state: State, best: tuple[str, str]) -> None:
        """Warn if no checkpoint could be the best one, or only that of the run's end."""
        there = {name for record in state.history for name in record.metrics} | set(state.metrics)
        if there and best[0] not in there:
            said = "checkpoint(keep_best=%r): no epoch had that metric, and none was kept; there are %s"
            logger.warning(said, best, sorted(there))
        elif there and self._wanted_within and best[0] not in self._shared.judged:
            said = "checkpoint(keep_best=%r): only the checkpoint of the run's end was judged. Within an epoch a "
            said += "checkpoint is judged if its iteration assigned the metric: use event='evaluated', for example"
            logger.warning(said, best)

    def take(self, state: State) -> None:
        """Save the run as it stands, once for each place; at an edge."""
        shared = self._shared
        judged = [{**rules, "best": self._judged(state, rules["best"])} for rules in shared.rules]
        shared.judged |= {rules["best"][0] for rules in judged if rules["best"] is not None}
        place, kind = self._place(state), (self._name, self._on_failure)
        if place != shared.place:
            shared.place, shared.taken = place, set()
        if kind in shared.taken:
            return
        self._check_owned()
        for part in self._loop.parts.values():  # a barrier: no checkpoint counts on what is not on the disk
            if callable(flush := getattr(part, "flush", None)):
                flush()
        stem = self._name(state) if self._name is not None else None
        if self._name is not None and not isinstance(stem, str):
            raise TypeError(f"checkpoint(name=...): the function returned {stem!r:.80}; return a name as a string")
        self.checkpoints.take(self._loop, judged, stem, self._on_failure)
        shared.taken.add(kind)

    def _judged(self, state: State, best: tuple[str, str] | None) -> tuple[str, str] | None:
        """Return `best` if its metric says what this state is worth."""
        fresh = best is not None and (not state.epoch_open or best[0] in self._loop.metrics.just_assigned)
        return best if fresh else None

    def _place(self, state: State) -> tuple[Any, ...]:
        """Return where the run stands, with the metrics that decide the best: the final event may assign them again."""
        evaluations = state.memory.get("evaluations", {}).get("number", 0)
        best = [rules["best"] for rules in self._shared.rules if rules["best"] is not None]
        values = [repr(state.metrics.get(metric)) for metric, _ in best]
        return state.total_iterations, state.clocks.epochs, state.epoch_open, evaluations, *values

    def close(self, state: State) -> None:
        """Wait until everything is safe; at an edge."""
        self.checkpoints.close()

    def _check_owned(self) -> None:
        if self._checked:
            return
        if found := unowned(self._loop):
            raise CheckpointError(
                f"a checkpoint would forget {'; '.join(found)}: have the loop own each, loop.own(name, part), "
                "or give it no state_dict"
            )
        self._checked = True
