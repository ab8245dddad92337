"""One action for several steps.

Shapes: N environments, O one observation, A one action.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rein.envs.wrappers.base import Wrapper, may_hold, require, where_rows
from rein.protocols import Environment
from rein.types import TimeStep, Tree


class FrameSkip(Wrapper):
    """Repeats every action for `skip` steps of the inner environment, and adds up their rewards.

    Where an episode ends within them, its step ends there: `final_observation` is what it led to, and the next episode
    waits at its first observation for an action of its own. For that the inner environment needs `apply_action_where`.

    Raises TypeError where it has none, ValueError for a skip below 1.
    """

    def __init__(self, inner: Environment, skip: int = 4) -> None:
        if skip < 1:
            raise ValueError(f"FrameSkip(skip={skip}): give the number of steps that an action lasts, 1 or more")
        require("FrameSkip", inner, "apply_action_where", "repeat the action inside of it, before episodes begin anew")
        self.inner = inner
        self.skip = skip

    @property
    def config(self) -> dict[str, Any]:
        """What it was built with, as JSON."""
        return self._config(skip=self.skip)

    def _step(self, action: Tree, mask: Tensor | None) -> TimeStep:
        time_step = self._step_inner(action, mask)
        on_N = time_step.valid & ~(time_step.terminated | time_step.truncated)
        for _ in range(self.skip - 1):
            if not may_hold(on_N):
                break
            following = self._step_inner(action, on_N)
            time_step = _joined(time_step, following, on_N)
            on_N = on_N & ~(following.terminated | following.truncated)
        return time_step


def _joined(time_step: TimeStep, following: TimeStep, on_N: Tensor) -> TimeStep:
    """Two steps as one; the second was taken where `on_N` (N,) is True."""
    return TimeStep(
        observation=following.observation,  # where it was not taken, the current one
        reward=torch.where(on_N, time_step.reward + following.reward, time_step.reward),
        terminated=time_step.terminated | (following.terminated & on_N),
        truncated=time_step.truncated | (following.truncated & on_N),
        final_observation=where_rows(on_N, following.final_observation, time_step.final_observation),
        valid=time_step.valid,
        info=where_rows(on_N, following.info, time_step.info),
    )
