"""How much to explore: by a schedule of `rein.schedules`, or by how the returns of episodes come along.

Shapes: E episodes, W of them in the window.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rein.schedules import Schedule, as_schedule


class Plateau:
    """A number that grows while returns stand still and shrinks while they change; it is read like a schedule.

    With each episode that ends, of the last W = `window` returns, or of all while there are fewer,

        value <- value * up      where |mean of the newer half - mean of the older half| < threshold
        value <- value * down    elsewhere

    within [low, high], from the second episode on. The defaults suit the epsilon of a discrete agent; for the standard
    deviation of a continuous one's noise there is `Plateau(0.01, low=0.001, high=0.2, up=1.1, down=0.9995)`.

    Raises ValueError for numbers out of their range.
    """

    def __init__(
        self,
        start: float = 1.0,
        *,
        low: float = 0.01,
        high: float = 1.0,
        up: float = 1.005,
        down: float = 0.995,
        window: int = 500,
        threshold: float = 0.01,
    ) -> None:
        if not 0.0 < low <= start <= high < math.inf:
            raise ValueError(f"Plateau({start}, low={low}, high={high}): give 0 < low <= start <= high")
        if not 0.0 < down <= 1.0 <= up < math.inf:
            raise ValueError(f"Plateau(up={up}, down={down}): give up from 1, and down from above 0 to 1")
        if window < 2 or window % 2:
            raise ValueError(f"Plateau(window={window}): give an even number, it has two halves")
        if not threshold >= 0.0:
            raise ValueError(f"Plateau(threshold={threshold}): give 0 or more")
        self.config: dict[str, Any] = {
            "start": start,
            "low": low,
            "high": high,
            "up": up,
            "down": down,
            "window": window,
            "threshold": threshold,
        }
        self.bounds = (low, high)
        self._up, self._down, self._window, self._threshold = up, down, window, threshold
        self._value = start
        self._return_W = torch.zeros(0, dtype=torch.float64, device="cpu")  # the oldest one first

    def __call__(self, *, env_steps: int | None = None, updates: int | None = None) -> float:
        """The value now, whatever the counts are."""
        return self._value

    def observe(self, returns_E: Tensor | Sequence[float]) -> None:
        """Take in the returns of episodes that ended, (E,), in their order; they come to the host."""
        return_E = torch.as_tensor(returns_E, dtype=torch.float64, device="cpu")
        history = torch.cat((self._return_W, return_E))
        low, high = self.bounds
        for plateau in self._plateaus(history, len(return_E)):
            factor = 1.0 if plateau is None else self._up if plateau else self._down
            self._value = min(max(self._value * factor, low), high)
        self._return_W = history[-self._window :].clone()

    def _plateaus(self, history: Tensor, episodes: int) -> list[bool | None]:
        """Whether returns stood still when each of the last `episodes` was the newest; None where there is no half."""
        sum_before = torch.cat((history.new_zeros(1), history.cumsum(0)))
        end_E = torch.arange(len(history) - episodes + 1, len(history) + 1, device="cpu")
        half_E = end_E.clamp(max=self._window) // 2
        newer_E = sum_before[end_E] - sum_before[end_E - half_E]
        older_E = sum_before[end_E - half_E] - sum_before[end_E - 2 * half_E]
        plateau_E = (newer_E - older_E).abs() < self._threshold * half_E
        return [still if half else None for still, half in zip(plateau_E.tolist(), half_E.tolist(), strict=True)]

    def state_dict(self) -> dict[str, Any]:
        """The value, and the returns that it goes by."""
        return {"value": self._value, "returns": self._return_W}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave; ValueError for more returns than the window holds."""
        value, returns = float(state["value"]), state["returns"]
        if len(returns) > self._window:
            raise ValueError(f"{len(returns)} returns are more than the window of this plateau, {self._window}")
        self._value = value
        self._return_W = returns.to("cpu", torch.float64, copy=True)


Amount = Schedule | Plateau


def as_amount(value: float | Amount) -> Amount:
    """What says how much to explore: a plateau as it is, a schedule from anything else."""
    return value if isinstance(value, Plateau) else as_schedule(value)
