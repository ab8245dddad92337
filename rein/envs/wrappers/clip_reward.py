"""Rewards between two bounds."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rein.envs.wrappers.forwarding import Forwarding
from rein.protocols import Environment
from rein.types import TimeStep, Tree


class ClipReward(Forwarding):
    """Clips every reward to [low, high]. Statistics and stores see the clipped one: it is the environment's.

    Raises ValueError unless low is less than high.
    """

    def __init__(self, inner: Environment, low: float = -1.0, high: float = 1.0) -> None:
        if not low < high:
            raise ValueError(f"ClipReward(low={low}, high={high}): give a low that is less than high")
        self.inner = inner
        self.low, self.high = float(low), float(high)

    @property
    def config(self) -> dict[str, Any]:
        """What it was built with, as JSON."""
        return self._config(low=self.low, high=self.high)

    def _step(self, action: Tree, mask: Tensor | None) -> TimeStep:
        time_step = self._step_inner(action, mask)
        clipped_N = time_step.reward.clamp(self.low, self.high)
        return time_step._replace(reward=torch.where(time_step.valid, clipped_N, 0.0))
