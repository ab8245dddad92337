"""Save the run on any event, by any filter; at the end of a run, too."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Literal

from rein.errors import CheckpointError
from rein.loop import Loop
from rein.loop.unowned import unowned
from rein.types import State

logger = logging.getLogger("rein")


def checkpoint(
    loop: Loop,
    store: Any,
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

        checkpoint(loop, store, every=10, keep_last=3, keep_best=("evaluation_return", "max"))

    `store` is an `HDF5Store`, whose run folder takes the checkpoints, or a `rein.Checkpoints(folder)`. Attach it after
    the other plug-ins. The loop takes a checkpoint at the next edge, when all handlers have run: trajectories are
    flushed, the state is copied, and a thread writes it while training goes on.

    Kept are the newest `keep_last` (None keeps all), those after each `keep_every` epochs, and apart from them, in
    `best/`, the one with the best value of a metric; the newest without NaN or infinity always. Judged are those at an
    epoch's end and, where the metric is an evaluation's, those taken in the iteration in which it was evaluated:
    `event="evaluated"` judges each evaluation, also in the middle of an epoch.
    `name(state)` gives another name than `epoch-000100`. What cannot be written ends the run, or with
    `on_failure="warn"` is logged. The saver that is returned takes one at the next edge when its `ask()` is called.

    Raises ValueError for nonsense, TypeError for what is no store of files; CheckpointError at the first checkpoint
    where a handler or the step uses something with a state that the loop does not own.
    """
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
    rules = {"last": keep_last, "every": keep_every, "best": keep_best}
    attach = loop.event(event)(**filters)
    saver = Saver(loop, checkpoints, rules, name, on_failure)
    loop.started.attach(saver.begin)
    attach(saver.save_at_next_edge)
    loop.epoch_ended.attach(saver.save_if_wanted)
    loop.on("completed", "halted", "failed")(saver.finish)
    return saver


class Saver:
    """Takes the checkpoints of a loop."""

    def __init__(
        self, loop: Loop, checkpoints: Any, rules: dict[str, Any], name: Callable[[State], str] | None, on_failure: str
    ) -> None:
        self.checkpoints = checkpoints
        self._loop, self._rules, self._name, self._on_failure = loop, rules, name, on_failure
        self._wanted = False  # at this epoch's end
        self._last: tuple[int, int, bool, int] | None = None  # where the run stood when the last one was taken
        self._checked = False
        self._reported_at: int | None = None  # the iterations that were finished when the metric was last evaluated
        self._wanted_within = self._judged = False  # whether one was in mid-epoch, and whether any could be the best

    def ask(self) -> None:
        """Take a checkpoint at the next edge; from any thread or signal handler. Before a run it does nothing."""
        if self._loop.running:
            self._loop.state.request(self.take)

    def begin(self, state: State) -> None:
        """Newer checkpoints of another run in the same folder are moved aside; a handler."""
        self._last, self._wanted = None, False
        self._wanted_within = self._judged = False
        self._listen()
        self.checkpoints.begin(self._loop)

    def _listen(self) -> None:
        """Hear of evaluations, if there are any and the best is kept."""
        evaluated = self._loop.events.get("evaluated")
        if self._rules["best"] is not None and evaluated is not None and self.note_evaluation not in evaluated.handlers:
            evaluated.attach(self.note_evaluation)

    def note_evaluation(self, state: State) -> None:
        """Remember where the metric of the best was evaluated, if it is of this evaluation; a handler."""
        metric, name = self._rules["best"][0], state.memory.get("evaluations", {}).get("name", "")
        parts = [part.removesuffix("_environment") for part in self._loop.parts if part.endswith("_environment")]
        # `hard_return` and `hard_2_return` both begin with `hard_`: it is of the longest name that fits
        if name == max((one for one in (name, *parts) if metric.startswith(f"{one}_")), key=len, default=None):
            self._reported_at = state.total_iterations

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
        """Say where no checkpoint could be the best one, or only that of the run's end."""
        there = {name for record in state.history for name in record.metrics} | set(state.metrics)
        if there and best[0] not in there:
            said = "checkpoint(keep_best=%r): no epoch had that metric, and none was kept; there are %s"
            logger.warning(said, best, sorted(there))
        elif there and self._wanted_within and not self._judged:
            said = "checkpoint(keep_best=%r): only that of the run's end could be the best: in the middle of an epoch "
            said += "those are judged that are taken when the metric was evaluated; give event='evaluated'"
            logger.warning(said, best)

    def take(self, state: State) -> None:
        """Save the run as it stands, once for each place; at an edge."""
        evaluations = state.memory.get("evaluations", {}).get("number", 0)  # there may be one in the final event
        here = (state.total_iterations, state.clocks.epochs, state.epoch_open, evaluations)
        if here == self._last:
            return
        self._check_owned()
        for part in self._loop.parts.values():  # a barrier: no checkpoint counts on what is not on the disk
            if callable(flush := getattr(part, "flush", None)):
                flush()
        stem = self._name(state) if self._name is not None else None
        if self._name is not None and not isinstance(stem, str):
            raise TypeError(f"checkpoint(name=...): the function returned {stem!r:.80}; return a name as a string")
        judged = not state.epoch_open or self._reported_at == state.total_iterations
        self._judged |= judged
        rules = self._rules if judged else {**self._rules, "best": None}
        self.checkpoints.take(self._loop, rules, stem, self._on_failure)
        self._last = here

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
