"""Three probes of the value alone: actions change nothing. They are what to look at first when learning fails.

With `Bandit(contextual=False)` for the policy and `Bandit()` for both together they are the ladder of Jones (2021):
climb it from `ConstantReward` up, and the first rung that breaks says where the mistake is.

Source: Jones, A. 2021, "Debugging Reinforcement Learning Systems", probe environments.

Shapes: S numbers of a state, N environments.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from gymnasium import spaces
from torch import Tensor

from rein.envs.base.drawing import GREEN, RED, WHITE, Frame, board
from rein.envs.probes.base import Probe, choices


class _ValueProbe(Probe):
    """The observation (N, 1) is the state; actions are Discrete(2) or in [-1, 1], and change nothing."""

    start = (0.0, 0.0)

    def __init__(
        self,
        num_envs: int = 16,
        *,
        continuous: bool = False,
        seed: int | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.continuous = continuous
        self.single_observation_space = spaces.Box(-1.0, 1.0, (1,))
        self.single_action_space = choices(2, continuous)
        self.initial_range = [self.start]
        super().__init__(num_envs, seed=seed, device=device)

    @abstractmethod
    def optimal_value(self, observation: Tensor, gamma: float) -> Tensor:
        """(N,) v(s) of what is observed, (N, 1)."""


class ConstantReward(_ValueProbe):
    """Episodes of one step that pay 1; the observation is 0. Does the value network learn a constant? v = 1."""

    @property
    def optimal_return(self) -> float:
        """1, whatever is done."""
        return 1.0

    def optimal_value(self, observation: Tensor, gamma: float) -> Tensor:
        """(N,) v = 1."""
        return torch.ones_like(observation[:, 0])

    def dynamics(self, state_SN: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Pay 1, and terminate."""
        reward_N = torch.ones_like(state_SN[0])
        return state_SN.clone(), reward_N, reward_N > 0.0

    def observe(self, state_SN: Tensor) -> Tensor:
        """Return 0."""
        return state_SN

    def draw(self, state: list[float]) -> Frame:
        """Draw one cell."""
        return board([[GREEN]])


class ObservedReward(_ValueProbe):
    """Episodes of one step that pay what is observed, 1 or -1. Does the value network see the observation? v(s) = s."""

    start = (-1.0, 1.0)  # the sign of it

    @property
    def optimal_return(self) -> float:
        """0: the mean over the observations, whatever is done."""
        return 0.0

    def optimal_value(self, observation: Tensor, gamma: float) -> Tensor:
        """(N,) v(s) = s."""
        return observation[:, 0].clone()

    def dynamics(self, state_SN: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Pay the observation, and terminate."""
        reward_N = self.observe(state_SN)[0]
        return state_SN.clone(), reward_N, torch.ones_like(reward_N, dtype=torch.bool)

    def observe(self, state_SN: Tensor) -> Tensor:
        """Return 1 or -1."""
        return torch.where(state_SN < 0.0, -1.0, 1.0)

    def draw(self, state: list[float]) -> Frame:
        """Draw one cell in the colour of the reward."""
        return board([[RED if state[0] < 0 else GREEN]])


class DelayedReward(_ValueProbe):
    """Episodes of two steps, of which the second pays 1. Is the reward discounted? v(0) = gamma, v(1) = 1.

    The observation is 0 in the first step and 1 in the second.
    """

    @property
    def optimal_return(self) -> float:
        """1, whatever is done."""
        return 1.0

    def optimal_value(self, observation: Tensor, gamma: float) -> Tensor:
        """(N,) gamma where the observation is 0, and 1 where it is 1."""
        return gamma ** (1.0 - observation[:, 0])

    def dynamics(self, state_SN: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Pay 1 in the second step, and terminate."""
        reward_N = state_SN[0].clone()
        state_SN = torch.ones_like(state_SN)
        return state_SN, reward_N, reward_N > 0.0

    def observe(self, state_SN: Tensor) -> Tensor:
        """Return the number of the step."""
        return state_SN

    def draw(self, state: list[float]) -> Frame:
        """Draw both steps."""
        return board([[WHITE, GREEN]], (0, state[0]))
