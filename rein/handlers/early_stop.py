"""End a run whose metric no longer improves."""

from __future__ import annotations

from typing import Any

import attrs

from rein.handlers.improvement import Improvement, Mode
from rein.loop import Loop
from rein.loop.state import State


def early_stop(
    loop: Loop,
    metric: str,
    *,
    mode: Mode,
    patience: int = 3,
    min_delta: float = 0.0,
    event: str = "epoch_ended",
    name: str | None = None,
    **filters: Any,
) -> None:
    """Halt the loop at the (`patience` + 1)-th firing in a row at which `metric` has not improved.

        early_stop(loop, "evaluation_return", mode="max", patience=4, every=5)

    A value improves the metric if it is lower (`mode="min"`) or higher ("max") than the best so far by more than
    `min_delta`. NaN never does. NaN before the first number does not count, and a warning is logged after `patience` of
    them. Attach `early_stop` after the handler that sets the metric, with the same filters. The best value and the
    count belong to the part `name` (`early_stop/<metric>` by default), so a resumed run continues to count. A run that
    was stopped stays stopped: to train on, give more patience, or set `loop.parts[name].since = 0`.

    Raises ValueError for numbers out of range, and if the loop owns a part of that name. Raises KeyError at a firing if
    the metric does not exist; the message lists the metrics.
    """
    attach = loop.event(event)(**filters)
    part = loop.own(name or f"early_stop/{metric}", EarlyStop(metric, patience, mode, min_delta))
    attach(part.check)
    loop.started.attach(part.halt_if_exhausted)


@attrs.define(eq=False)
class EarlyStop(Improvement):
    """What `early_stop` remembers."""

    asked_by = "early_stop"

    def check(self, state: State) -> None:
        """Look at this firing's value, and halt where patience has run out; a handler."""
        self.look(state)
        self.halt_if_exhausted(state)

    def halt_if_exhausted(self, state: State) -> None:
        """Halt where patience has run out, in this run or in the one that it resumes; a handler."""
        if self.exhausted:
            state.halt_loop(f"{self.metric} has not improved {self.since} times in a row; its best is {self.best:.5g}")
