"""Wrappers that change rewards."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rein.envs.wrappers.base import Wrapper
from rein.protocols import Environment
from rein.types import TimeStep, Tree


class ClipReward(Wrapper):
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


class ScaleReward(Wrapper):
    """Multiplies every reward by `scale`. Statistics and stores see the scaled one: it is the environment's."""

    def __init__(self, inner: Environment, scale: float) -> None:
        self.inner = inner
        self.scale = float(scale)

    @property
    def config(self) -> dict[str, Any]:
        """What it was built with, as JSON."""
        return self._config(scale=self.scale)

    def _step(self, action: Tree, mask: Tensor | None) -> TimeStep:
        time_step = self._step_inner(action, mask)
        return time_step._replace(reward=time_step.reward * self.scale)


class SignReward(Wrapper):
    """Makes every reward -1, 0 or 1 (Mnih et al. 2015, Methods: one learning rate for games of any score).

    Statistics and stores see the sign: it is the environment's reward.
    """

    def __init__(self, inner: Environment) -> None:
        self.inner = inner

    @property
    def config(self) -> dict[str, Any]:
        """What it was built with, as JSON."""
        return self._config()

    def _step(self, action: Tree, mask: Tensor | None) -> TimeStep:
        time_step = self._step_inner(action, mask)
        return time_step._replace(reward=time_step.reward.sign())
