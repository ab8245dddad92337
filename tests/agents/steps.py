"""Steps of agents that several tests share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import rein
from rein.ops.random import generator
from rein.ops.trees import leaves


def practice(agent: Any, observation: Any, reward_of: Callable[[Tensor], Tensor], steps: int) -> None:
    """Let an agent learn in episodes of one step that begin with the same observations."""
    (_, first), *_ = leaves(observation)
    no = torch.zeros(len(first), dtype=torch.bool)
    for _ in range(steps):
        action, extras = agent.select_action(observation)
        reward = reward_of(action)
        agent.record_observation(rein.Transition(observation, action, reward, ~no, no, observation, ~no, extras))
        agent.optimize_model()


def drive(agent: Any, steps: int, num_envs: int = 6) -> None:
    """Run an agent on random transitions: terminated, truncated, invalid rows with NaN, and resets outside a step."""
    stream = generator(0, "stream")

    def some(share: float) -> Tensor:
        return torch.rand(num_envs, generator=stream) < share

    def seen() -> Tensor:
        return torch.rand(num_envs, agent.observation_space.shape[0], generator=stream)

    observation = seen()
    for t in range(steps):
        action, extras = agent.select_action(observation)
        valid_N = ~some(0.05)
        terminated_N, truncated_N = some(0.08) & valid_N, some(0.08) & valid_N
        after, reward_N = seen(), torch.rand(num_envs, generator=stream)
        reward_N = torch.where(valid_N, reward_N, torch.nan)
        row = (observation, action, reward_N, terminated_N, truncated_N, after, valid_N, extras)
        agent.record_observation(rein.Transition(*row))
        agent.optimize_model()
        over_N = terminated_N | truncated_N | ~valid_N
        observation = torch.where(over_N[:, None], seen(), after)
        if t % 5 == 3:
            mask_N = some(0.3)
            observation = torch.where(mask_N[:, None], seen(), observation)
            agent.observe_reset(observation, mask_N)
