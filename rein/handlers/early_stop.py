"""End a run whose metric no longer improves."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import attrs

from rein.loop import Loop
from rein.types import State


def early_stop(
    loop: Loop,
    metric: str,
    *,
    patience: int = 3,
    mode: Literal["min", "max"] = "min",
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
class EarlyStop:
    """What `early_stop` remembers: the best value, None before the first, and the firings `since` it improved."""

    metric: str
    patience: int
    mode: Literal["min", "max"]
    min_delta: float
    best: float | None = None
    since: int = 0

    def __attrs_post_init__(self) -> None:
        if self.mode not in ("min", "max"):
            raise ValueError(f'early_stop(mode={self.mode!r}): give "min" or "max", the direction that is better')
        if not isinstance(self.patience, int) or self.patience < 0:
            raise ValueError(f"early_stop(patience={self.patience}): give a whole number, 0 or more")
        if not self.min_delta >= 0:
            raise ValueError(f"early_stop(min_delta={self.min_delta}): give 0 or more; mode= says the direction")

    def check(self, state: State) -> None:
        """Compare this firing's value with the best so far; a handler."""
        value = state.metrics[self.metric]
        if self._improves(value):
            self.best, self.since = value, 0
        else:
            self.since += 1
        self.halt_if_exhausted(state)

    def halt_if_exhausted(self, state: State) -> None:
        """Halt where patience has run out, in this run or in the one that it resumes; a handler."""
        if self.since > self.patience:
            best = "it never was a number" if self.best is None else f"its best is {self.best:.5g}"
            state.halt_loop(f"{self.metric} has not improved {self.since} times in a row; {best}")

    def _improves(self, value: float) -> bool:
        if self.best is None:
            return not math.isnan(value)
        return value < self.best - self.min_delta if self.mode == "min" else value > self.best + self.min_delta

    @property
    def config(self) -> dict[str, Any]:
        """What it was built with, as JSON."""
        return {name: getattr(self, name) for name in ("metric", "patience", "mode", "min_delta")}

    def state_dict(self) -> dict[str, Any]:
        """The best value and the firings since then."""
        return {"best": self.best, "since": self.since}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave."""
        self.best, self.since = state["best"], state["since"]
