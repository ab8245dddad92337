"""Probes of bootstrapping: values of delayed rewards, and of episodes that were truncated.

Shapes: S numbers of a state, N environments.
"""

from __future__ import annotations

import torch
from gymnasium import spaces
from torch import Tensor

from rein.envs.base.rendering import GREEN, WHITE, YELLOW, Frame, board
from rein.envs.probes.probe import Probe, choices, chosen, one_hot


class Corridor(Probe):
    """Corridor from 0 to `length`. The step that reaches the end has reward 1 and terminates; other rewards are 0.

    An episode starts at 0. Action 0 moves left by 1, and action 1 moves right by 1. With `continuous=True` the action
    in [-1, 1] is the move. Positions are clipped at 0. The observation (N, 1) is the position as a fraction of
    `length`. An episode is truncated after `max_episode_steps` (None: never).

    The best return is 1. The best policy goes right, and its value at position x with discount factor gamma is::

        v(x) = gamma^(ceil(length - x) - 1)

    Raises ValueError if `max_episode_steps` is too small to reach the end.
    """

    optimal_return = 1.0

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
        super().__init__(num_envs, seed=seed, max_episode_steps=max_episode_steps, device=device)

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


class Fork(Probe):
    """Choice in the first step between a prize and a road with reward 1 per step.

    Action 0 gives `prize` and terminates. Action 1 takes the road, which has reward 1 in every later step and never
    terminates. An episode is truncated after `max_episode_steps`. Actions on the road have no effect. The observation
    (N, 2) is (1, 0) at the fork and (0, 1) on the road, without the time. With `continuous=True` actions are in
    [-1, 1], and negative actions mean 0.

    With discount factor gamma the value of the road is::

        gamma / (1 - gamma)                                if truncated episodes bootstrap from `final_observation`
        (gamma - gamma^max_episode_steps) / (1 - gamma)    at most, if truncated episodes count as terminated

    With the defaults and gamma = 0.9, the first is 9 and the road is the better choice. The second is at most 5.5, so
    the agent takes the prize of 7. The best return of an episode is the maximum of `prize` and max_episode_steps - 1.
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
        self.optimal_return = max(self.prize, max_episode_steps - 1.0)  # the prize, or 1 per step after the first
        self.continuous = continuous
        self.single_observation_space = spaces.Box(0.0, 1.0, (2,))
        self.single_action_space = choices(2, continuous)
        super().__init__(num_envs, seed=seed, max_episode_steps=max_episode_steps, device=device)

    def optimal_value(self, observation: Tensor, gamma: float) -> Tensor:
        """Return max(prize, gamma / (1 - gamma)) at the fork and 1 / (1 - gamma) on the road, shape (N,)."""
        road = 1.0 / (1.0 - gamma)
        return torch.where(observation[:, 1] > 0.0, road, max(self.prize, gamma * road))

    def dynamics(self, state_SN: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Take the prize, or continue along the road."""
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
