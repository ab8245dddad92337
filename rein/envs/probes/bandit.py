"""Bandit probe: tests the policy gradient, and whether the policy uses the observation.

Shapes: S numbers of a state, N environments, K arms.
"""

from __future__ import annotations

import torch
from gymnasium import spaces
from torch import Tensor

from rein.envs.base.drawing import GREEN, WHITE, Frame, board
from rein.envs.probes.base import Probe, choices, chosen, one_hot


class Bandit(Probe):
    """Contextual bandit: one arm has reward 1, and the others have reward 0. Episodes have one step.

    The arm with the reward is drawn for each episode. The observation (N, K) is its one-hot vector. With
    `contextual=False` the observation is 0 and the last arm always has the reward. With `continuous=True` actions are
    in [-1, 1], and the arms are equal intervals of that range.

    The best return is 1. The mean return of random actions is 1 / arms.

    Raises ValueError for fewer than two arms.
    """

    def __init__(
        self,
        num_envs: int = 16,
        arms: int = 2,
        *,
        contextual: bool = True,
        continuous: bool = False,
        seed: int | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        if arms < 2:
            raise ValueError(f"Bandit(arms={arms}): give 2 or more")
        self.arms = arms
        self.contextual = contextual
        self.continuous = continuous
        self.single_observation_space = spaces.Box(0.0, 1.0, (arms,))
        self.single_action_space = choices(arms, continuous)
        self.initial_range = [
            (0.0, arms) if contextual else (arms - 1.0, arms - 1.0)
        ]  # the integer part is the arm with the reward
        super().__init__(num_envs, seed=seed, device=device)

    @property
    def optimal_return(self) -> float:
        """Best expected return: 1."""
        return 1.0

    def optimal_value(self, observation: Tensor, gamma: float) -> Tensor:
        """Return v(s) = 1, shape (N,)."""
        return torch.ones_like(observation[:, 0])

    def dynamics(self, state_SN: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return reward 1 for the right arm, and terminate."""
        hit_N = chosen(action, self.arms) == state_SN[0].long()
        return state_SN.clone(), hit_N.to(torch.float32), torch.ones_like(hit_N)

    def observe(self, state_SN: Tensor) -> Tensor:
        """Return the one-hot vector of the arm with the reward, or zeros."""
        if self.contextual:
            return one_hot(state_SN[0], self.arms)
        return torch.zeros(self.arms, state_SN.shape[1], dtype=torch.float32, device=state_SN.device)

    def draw(self, state: list[float]) -> Frame:
        """Draw one cell for each arm."""
        return board([[GREEN if arm == int(state[0]) else WHITE for arm in range(self.arms)]])
