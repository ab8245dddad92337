"""Wrappers that repeat actions or limit the length of episodes.

Shapes: N environments, O one observation, A one action.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rein.envs.base.contract import where_rows
from rein.envs.wrappers.wrapper import Wrapper, may_hold, require
from rein.protocols import Environment
from rein.types import TimeStep, Tree


class FrameSkip(Wrapper):
    """Repeat every action for `skip` steps of the inner environment, and sum the rewards.

    If an episode ends within these steps, the wrapper's step ends there, and the next action begins the next episode.
    The inner environment needs `apply_action_where`.

    Raises TypeError if the inner environment lacks it, and ValueError for a skip below 1.
    """

    def __init__(self, inner: Environment, skip: int = 4) -> None:
        if skip < 1:
            raise ValueError(f"FrameSkip(skip={skip}): give the number of steps per action, 1 or more")
        require("FrameSkip", inner, "apply_action_where", "repeat the action inside the environment instead")
        self.inner = inner
        self.skip = skip

    def _step(self, action: Tree, mask: Tensor | None) -> TimeStep:
        time_step = self._step_inner(action, mask)
        on_N = time_step.valid & ~(time_step.terminated | time_step.truncated)
        for _ in range(self.skip - 1):
            if not may_hold(on_N):
                break
            following = self._step_inner(action, on_N)
            time_step = _joined(time_step, following, on_N)
            on_N = on_N & ~(following.terminated | following.truncated)
        return _consistent(time_step, self)


def _joined(time_step: TimeStep, following: TimeStep, on_N: Tensor) -> TimeStep:
    """Combine two steps. The second was taken in the rows where `on_N` (N,) is True."""
    return TimeStep(
        observation=following.observation,  # the current one in the other rows
        reward=torch.where(on_N, time_step.reward + following.reward, time_step.reward),
        terminated=time_step.terminated | (following.terminated & on_N),
        truncated=time_step.truncated | (following.truncated & on_N),
        final_observation=where_rows(on_N, following.final_observation, time_step.final_observation),
        valid=time_step.valid,
        info=where_rows(on_N, following.info, time_step.info),
    )


def _consistent(time_step: TimeStep, environment: Wrapper) -> TimeStep:
    """Return the step with equal observations for agents that have left, whose world may have been reset."""
    if not hasattr(environment, "worlds"):
        return time_step
    final = where_rows(time_step.valid, time_step.final_observation, time_step.observation)
    return time_step._replace(final_observation=final)


class TimeLimit(Wrapper):
    """Truncate episodes after `max_episode_steps` steps. Only the truncated environments are reset.

    The inner environment needs `reset_where`. An episode that terminates in the last allowed step is both terminated
    and truncated, as in Gymnasium.

    Raises TypeError if the inner environment lacks `reset_where`, and ValueError for a limit below 1.
    """

    saved_tensors = (("steps", "_steps_N"),)

    def __init__(self, inner: Environment, max_episode_steps: int) -> None:
        if max_episode_steps < 1:
            raise ValueError(f"TimeLimit(max_episode_steps={max_episode_steps}): give 1 or more")
        require("TimeLimit", inner, "reset_where", "set a limit when you build the environment")
        self.inner = inner
        self.max_episode_steps = max_episode_steps
        self._steps_N = torch.zeros(inner.num_envs, dtype=torch.int64, device=inner.device)

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
        if may_hold(cut_N):
            time_step = time_step._replace(observation=self.inner.reset_where(cut_N))
            time_step = _consistent(time_step, self)
        return time_step._replace(truncated=time_step.truncated | reached_N)
