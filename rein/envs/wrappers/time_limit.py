"""Episodes of a limited length.

Shapes: N environments.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rein.envs.base.contract import restored
from rein.envs.wrappers.base import Wrapper, may_hold, require, where_inside
from rein.protocols import Environment
from rein.types import TimeStep, Tree


class TimeLimit(Wrapper):
    """Truncates every episode after `max_episode_steps` steps and begins the next one in that environment only.

    For that the inner environment needs `reset_where`. What ends an episode before its limit is left as it is; an
    episode whose last allowed step terminates it is both, as in Gymnasium.

    Raises TypeError where the inner environment cannot reset only some, ValueError for a limit below 1.
    """

    def __init__(self, inner: Environment, max_episode_steps: int) -> None:
        if max_episode_steps < 1:
            raise ValueError(f"TimeLimit(max_episode_steps={max_episode_steps}): give 1 or more")
        require("TimeLimit", inner, "reset_where", "give the environment a limit of its own when you build it")
        self.inner = inner
        self.max_episode_steps = max_episode_steps
        self._steps_N = torch.zeros(inner.num_envs, dtype=torch.int64, device=inner.device)

    @property
    def config(self) -> dict[str, Any]:
        """What it was built with, as JSON."""
        return self._config(max_episode_steps=self.max_episode_steps)

    @where_inside
    def state_dict(self) -> dict[str, Any]:
        """The inner environment's, and the steps of every episode so far."""
        return {"inner": self.inner.state_dict(), "steps": self._steps_N}

    @where_inside
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave; ValueError for another number of environments."""
        steps_N = restored(state, "steps", self._steps_N)
        self.inner.load_state_dict(state["inner"])
        self._steps_N = steps_N

    def _begin(self, observation: Tree, mask: Tensor | None) -> Tree:
        self._steps_N = torch.zeros_like(self._steps_N) if mask is None else self._steps_N.masked_fill(mask, 0)
        return observation

    def _step(self, action: Tree, mask: Tensor | None) -> TimeStep:
        time_step = self._step_inner(action, mask)
        steps_N = self._steps_N + time_step.valid
        reached_N = steps_N >= self.max_episode_steps
        ended_N = time_step.terminated | time_step.truncated
        self._steps_N = steps_N.masked_fill(ended_N | reached_N, 0)
        cut_N = reached_N & ~ended_N
        observation = self.inner.reset_where(cut_N) if may_hold(cut_N) else time_step.observation
        return time_step._replace(observation=observation, truncated=time_step.truncated | reached_N)
