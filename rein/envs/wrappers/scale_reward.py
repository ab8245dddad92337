"""Rewards times a constant."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from rein.envs.wrappers.forwarding import Forwarding
from rein.protocols import Environment
from rein.types import TimeStep, Tree


class ScaleReward(Forwarding):
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
