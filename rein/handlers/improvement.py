"""Track the best value of a metric and the time since the last improvement."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import attrs

from rein.loop.state import State

Mode = Literal["min", "max"]

logger = logging.getLogger("rein")


@attrs.define(eq=False)
class Improvement:
    """Tracks the best value of a metric, and the number of firings `since` the last improvement.

    A value is better if it is lower (`mode="min"`) or higher ("max") than the best value by more than `min_delta`. The
    first number is always better. NaN is never better. NaN before the first number is not counted; a warning is logged
    after `patience` of them.

    Raises ValueError if a number is out of range.
    """

    caller: ClassVar[str] = "Improvement"  # name of the function in messages

    metric: str
    patience: int  # firings without improvement that are allowed
    mode: Mode
    min_delta: float
    best: float | None = attrs.field(default=None, init=False)  # None before the first number
    since: int = attrs.field(default=0, init=False)
    missing: int = attrs.field(default=0, init=False)  # NaNs before the first number, in this process

    def __attrs_post_init__(self) -> None:
        if self.mode not in ("min", "max"):
            raise ValueError(
                f'{self.caller}(mode={self.mode!r}): expected "min" (lower is better) or "max" (higher is better)'
            )
        if not isinstance(self.patience, int) or self.patience < 0:
            raise ValueError(f"{self.caller}(patience={self.patience}): expected an integer of at least 0")
        if not self.min_delta >= 0:
            raise ValueError(
                f"{self.caller}(min_delta={self.min_delta}): expected at least 0; mode= gives the direction"
            )

    def compare(self, state: State) -> None:
        """Compare the current value of the metric with the best one, if it has a value."""
        value = state.metrics.get(self.metric)
        if value is None or (math.isnan(value) and state._left):  # `stop` ended the evaluation that sets it
            return
        if math.isnan(value) and self.best is None:
            self.missing += 1
            if self.missing == max(self.patience, 1):
                logger.warning("%s: %s has been NaN %d times", self.caller, self.metric, self.missing)
        elif self.best is None or self._is_better(value, self.best):
            self.best, self.since = value, 0
        else:
            self.since += 1

    def _is_better(self, value: float, best: float) -> bool:
        return value < best - self.min_delta if self.mode == "min" else value > best + self.min_delta

    @property
    def exhausted(self) -> bool:
        """Whether the number of firings without improvement exceeds `patience`."""
        return self.best is not None and self.since > self.patience

    @property
    def config(self) -> dict[str, Any]:
        """Options as JSON."""
        return {name: getattr(self, name) for name in ("metric", "patience", "mode", "min_delta")}

    def state_dict(self) -> dict[str, Any]:
        """Return the best value and the count."""
        return {"best": self.best, "since": self.since}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state_dict`."""
        self.best, self.since = state["best"], state["since"]
