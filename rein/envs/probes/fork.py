"""A fork: a prize at once, or a road without an end that a clock cuts. Is what was truncated taken for terminated?

Shapes: S numbers of a state, N environments.
"""

from __future__ import annotations

import torch
from gymnasium import spaces
from torch import Tensor

from rein.envs.base.drawing import GREEN, WHITE, YELLOW, Frame, board
from rein.envs.probes.base import Probe, choices, chosen, one_hot


class Fork(Probe):
    """One choice in the first step: 0 takes `prize` and terminates; 1 takes the road, which pays 1 a step from then on.

    The road never terminates; an episode is truncated after `max_episode_steps`. Actions on the road do nothing. The
    observation (N, 2) is (1, 0) at the fork and (0, 1) on the road: it does not show the time. `continuous=True` takes
    actions in [-1, 1], of which the negative ones are 0.

    With discount gamma the road is worth

        gamma / (1 - gamma)                       for whoever goes on from `final_observation` where the clock runs out,
        (gamma - gamma^max_episode_steps) / (1 - gamma)          at most for whoever takes that for the end,

    so with the defaults and a gamma of 0.9 it is 9 for the former, who takes it, and 5.5 at most for the latter, who
    takes the prize of 7. The best return of an episode is the greater of `prize` and max_episode_steps - 1.
    """

    def __init__(
        self,
        num_envs: int = 16,
        prize: float = 7.0,
        *,
        continuous: bool = False,
        seed: int | None = None,
        max_episode_steps: int = 10,
        device: torch.device | str = "cpu",
    ) -> None:
        self.prize = float(prize)
        self.max_episode_steps = max_episode_steps
        self.continuous = continuous
        self.single_observation_space = spaces.Box(0.0, 1.0, (2,))
        self.single_action_space = choices(2, continuous)
        self.initial_range = [(0.0, 0.0)]  # 0 at the fork, 1 on the road
        super().__init__(num_envs, seed=seed, max_episode_steps=max_episode_steps, device=device)

    @property
    def optimal_return(self) -> float:
        """The prize, or 1 for every step after the first: 9 by default."""
        return max(self.prize, self.max_episode_steps - 1.0)

    def optimal_value(self, observation: Tensor, gamma: float) -> Tensor:
        """(N,) at the fork max(prize, gamma / (1 - gamma)), on the road 1 / (1 - gamma)."""
        road = 1.0 / (1.0 - gamma)
        return torch.where(observation[:, 1] > 0.0, road, max(self.prize, gamma * road))

    def dynamics(self, state_SN: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Take the prize, or go on along the road."""
        road_N = state_SN[0]
        takes_N = (chosen(action, 2) == 0) & (road_N == 0.0)
        state_SN = (~takes_N).to(torch.float32)[None]
        return state_SN, road_N + takes_N * self.prize, takes_N

    def observe(self, state_SN: Tensor) -> Tensor:
        """Return (1, 0) at the fork and (0, 1) on the road."""
        return one_hot(state_SN[0], 2)

    def draw(self, state: list[float]) -> Frame:
        """Draw the prize, the fork and the road."""
        return board([[YELLOW, WHITE, GREEN]], (0, 1.0 + state[0]))
