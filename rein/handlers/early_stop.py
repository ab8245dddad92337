"""End a run whose metric no longer improves."""

from __future__ import annotations

from typing import Any

import attrs

from rein.improvement import Improvement, Mode
from rein.loop import Loop
from rein.types import State


def early_stop(
    loop: Loop,
    metric: str,
    *,
    patience: int = 3,
    mode: Mode = "min",
    min_delta: float = 0.0,
    event: str = "epoch_ended",
    name: str | None = None,
    **filters: Any,
) -> None:
    """Halt the loop at the (`patience` + 1)-th firing in a row at which `metric` has not improved.

    Improved means: lower (`mode="min"`) or higher ("max") than the best so far by more than `min_delta`; NaN never is.
    Attach it after whatever sets the metric, with the same filters. Best value and count belong to the part `name`
    (`early_stop/<metric>` by default), so a resumed run goes on counting, and one that was stopped stays stopped: to
    train on, give more patience, or set `loop.parts[name].since = 0`.

    Raises ValueError for numbers out of range and where the loop owns a part of that name; KeyError at a firing, with
    the metrics there are, where there is no such metric.
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
            best = "it never was a number" if self.best is None else f"its best is {self.best:.5g}"
            state.halt_loop(f"{self.metric} has not improved {self.since} times in a row; {best}")
