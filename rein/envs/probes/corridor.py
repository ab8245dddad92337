"""A corridor: only its end pays. Does the value of the end reach the beginning?

Shapes: S numbers of a state, N environments.
"""

from __future__ import annotations

import torch
from gymnasium import spaces
from torch import Tensor

from rein.envs.base.drawing import GREEN, WHITE, Frame, board
from rein.envs.probes.base import Probe, choices


class Corridor(Probe):
    """A corridor from 0 to `length`, begun at 0: the step that reaches the end pays 1 and terminates, others pay 0.

    Actions are 0 left and 1 right, by one; with `continuous=True` they are the move itself, in [-1, 1]. Nothing lies
    left of 0. The observation (N, 1) is the position as a fraction of `length`. An episode is truncated after
    `max_episode_steps` (None: never), and what the clock cuts off is worth no less for it.

    The best return is 1, and from position x on with discount gamma the best policy, which goes right, has

        v(x) = gamma^(ceil(length - x) - 1).

    Raises ValueError for a clock that runs out before the end can be reached.
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
            raise ValueError(f"Corridor(length={length}, {steps}): its end takes {length} steps; give that or more")
        self.length = length
        self.continuous = continuous
        self.single_observation_space = spaces.Box(0.0, 1.0, (1,))
        self.single_action_space = choices(2, continuous)
        self.initial_range = [(0.0, 0.0)]
        super().__init__(num_envs, seed=seed, max_episode_steps=max_episode_steps, device=device)

    @property
    def optimal_return(self) -> float:
        """1: the end is reached in time."""
        return 1.0

    def optimal_value(self, observation: Tensor, gamma: float) -> Tensor:
        """(N,) the discounted return of going right from what is observed, (N, 1)."""
        left_N = ((1.0 - observation[:, 0]) * self.length - 1e-4).ceil()  # what is rounded up is not a rounding error
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
