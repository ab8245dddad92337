"""Wrappers that change rewards."""

from __future__ import annotations

import torch
from torch import Tensor

from rein.envs.wrappers.wrapper import Wrapper
from rein.protocols import Environment
from rein.types import TimeStep, Tree


class ClipReward(Wrapper):
    """Clip rewards to [low, high]. Statistics and stores record the clipped reward.

    Raises ValueError unless low is less than high.
    """

    def __init__(self, inner: Environment, low: float = -1.0, high: float = 1.0) -> None:
        if not low < high:
            raise ValueError(f"ClipReward(low={low}, high={high}): give a low that is less than high")
        self.inner = inner
        self.low, self.high = float(low), float(high)

    def _step(self, action: Tree, mask: Tensor | None) -> TimeStep:
        time_step = self._step_inner(action, mask)
        clipped_N = time_step.reward.clamp(self.low, self.high)
        return time_step._replace(reward=torch.where(time_step.valid, clipped_N, 0.0))


class ScaleReward(Wrapper):
    """Multiply rewards by `scale`. Statistics and stores record the scaled reward."""

    def __init__(self, inner: Environment, scale: float) -> None:
        self.inner = inner
        self.scale = float(scale)

    def _step(self, action: Tree, mask: Tensor | None) -> TimeStep:
        time_step = self._step_inner(action, mask)
        return time_step._replace(reward=time_step.reward * self.scale)


class SignReward(Wrapper):
    """Replace rewards by their signs: -1, 0 or 1. Statistics and stores record the sign.

    One learning rate then works for games with different score scales. Source: Mnih et al. 2015, Methods.
    """

    def __init__(self, inner: Environment) -> None:
        self.inner = inner

    def _step(self, action: Tree, mask: Tensor | None) -> TimeStep:
        time_step = self._step_inner(action, mask)
        return time_step._replace(reward=time_step.reward.sign())
