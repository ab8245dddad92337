"""Rewards of which only the sign counts."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from rein.envs.wrappers.forwarding import Forwarding
from rein.protocols import Environment
from rein.types import TimeStep, Tree


class SignReward(Forwarding):
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
