"""What the probes share: their face, and actions of either kind.

Shapes: N environments, S numbers that are the state of one, O one observation, A one action, K choices.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor

from rein.envs.base.simulation import Moved, Physics, SimulatedEnvironment


class Probe(SimulatedEnvironment):
    """N environments of which the best return is known; the functions that a probe adds are physics and picture.

    `starts` are the least and greatest of each number of the first state, `limit` truncates, and `options` are what
    `config` tells beside `num_envs`, `seed` and `device`.
    """

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        starts: Sequence[tuple[float, float]],
        options: Mapping[str, Any],
        *,
        num_envs: int,
        seed: int | None,
        device: torch.device | str,
        limit: int | None = None,
    ) -> None:
        super().__init__(
            Physics(self._move, starts, observe=self._observe),
            observation_space,
            action_space,
            num_envs=num_envs,
            seed=seed,
            max_episode_steps=limit,
            device=device,
            options=options,
        )

    @property
    @abstractmethod
    def optimal_return(self) -> float:
        """The sum of rewards that the best policy expects of an episode."""

    @abstractmethod
    def _move(self, state_SN: Tensor, action: Tensor) -> Moved:
        """What an action (N, *A) does."""

    @abstractmethod
    def _observe(self, state_SN: Tensor) -> Tensor:
        """What is seen of states (S, N): (O, N) float32."""


def choices(count: int, continuous: bool) -> spaces.Space[Any]:
    """The space of a choice among `count`: Discrete, or the interval [-1, 1] cut into as many equal parts."""
    return spaces.Box(-1.0, 1.0, (1,)) if continuous else spaces.Discrete(count)


def chosen(action: Tensor, count: int) -> Tensor:
    """(N,) int64: which of `count` an action chooses; an action of either kind, (N,) integers or (N, 1) in [-1, 1]."""
    if not action.is_floating_point():
        return action
    return ((action[:, 0] + 1.0) * (0.5 * count)).long().clamp_(0, count - 1)


def one_hot(index_N: Tensor, count: int) -> Tensor:
    """(K, N) float32: 1 where the row is the whole part of `index_N`, a float or an integer; 0 elsewhere."""
    return (index_N.long() == torch.arange(count, device=index_N.device)[:, None]).to(torch.float32)
