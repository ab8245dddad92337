"""Corridor probe: tests whether the value of a delayed reward reaches the first states.

Shapes: S numbers of a state, N environments.
"""

from __future__ import annotations

import torch
from gymnasium import spaces
from torch import Tensor

from rein.envs.base.drawing import GREEN, WHITE, Frame, board
from rein.envs.probes.base import Probe, choices


class Corridor(Probe):
    """Corridor from 0 to `length`. The step that reaches the end has reward 1 and terminates; other rewards are 0.

    An episode starts at 0. Action 0 moves left by 1, and action 1 moves right by 1. With `continuous=True` the action
    in [-1, 1] is the move. Positions are clipped at 0. The observation (N, 1) is the position as a fraction of
    `length`. An episode is truncated after `max_episode_steps` (None: never).

    The best return is 1. The best policy goes right, and its value at position x with discount factor gamma is::

        v(x) = gamma^(ceil(length - x) - 1)

    Raises ValueError if `max_episode_steps` is too small to reach the end.
    """

    def __init__(
        self,
        num_envs: int = 16,
        length: int = 5,
        *,
        continuous: bool = False,
        seed: int | None = None,
        max_episode_steps: int | None = 20,
        device: torch.device | str = "cpu",
    ) -> None:
        if length < 1:
            raise ValueError(f"Corridor(length={length}): give 1 or more")
        if max_episode_steps is not None and 1 <= max_episode_steps < length:
            steps = f"max_episode_steps={max_episode_steps}"
            raise ValueError(f"Corridor(length={length}, {steps}): give at least {length} steps to reach the end")
        self.length = length
        self.continuous = continuous
        self.single_observation_space = spaces.Box(0.0, 1.0, (1,))
        self.single_action_space = choices(2, continuous)
        self.initial_range = [(0.0, 0.0)]
        super().__init__(num_envs, seed=seed, max_episode_steps=max_episode_steps, device=device)

    @property
    def optimal_return(self) -> float:
        """Best expected return: 1."""
        return 1.0

    def optimal_value(self, observation: Tensor, gamma: float) -> Tensor:
        """Return the discounted return (N,) of going right from the observed positions (N, 1)."""
        left_N = ((1.0 - observation[:, 0]) * self.length - 1e-4).ceil()  # 1e-4: rounding errors are not rounded up
        return gamma ** (left_N - 1.0)

    def dynamics(self, state_SN: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Move left or right."""
        move_N = action[:, 0].clamp(-1.0, 1.0) if action.is_floating_point() else 2 * action - 1
        state_SN = (state_SN + move_N).clamp_(0.0, self.length)
        reached_N = state_SN[0] == self.length
        return state_SN, reached_N.to(torch.float32), reached_N

    def observe(self, state_SN: Tensor) -> Tensor:
        """Return the position as a fraction of the length."""
        return state_SN / self.length

    def draw(self, state: list[float]) -> Frame:
        """Draw the corridor and the position."""
        return board([[WHITE] * self.length + [GREEN]], (0, state[0]))
