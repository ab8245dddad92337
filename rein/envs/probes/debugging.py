"""Probes that find the mistake in a value or policy update. Run these first if an agent does not learn.

`ConstantReward`, `ObservedReward` and `DelayedReward` test value learning, because actions have no effect.
`Bandit(contextual=False)` tests the policy, and `Bandit()` tests both. These are the probe environments of Jones
(2021). Run them in this order: the first probe that fails shows where the mistake is.

Source: Jones, A. 2021, "Debugging Reinforcement Learning Systems", probe environments.

Shapes: S numbers of a state, N environments, K arms.
"""

from __future__ import annotations

import torch
from gymnasium import spaces
from torch import Tensor

from rein.envs.base.rendering import GREEN, RED, WHITE, Frame, board
from rein.envs.probes.probe import OneStepProbe, Probe, choices, chosen, one_hot


class _ValueProbe(Probe):
    """Base class: the observation (N, 1) is the state, and actions in Discrete(2) or [-1, 1] have no effect."""

    single_observation_space = spaces.Box(-1.0, 1.0, (1,))

    def __init__(
        self,
        num_envs: int = 16,
        *,
        continuous: bool = False,
        seed: int | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.continuous = continuous
        self.single_action_space = choices(2, continuous)
        super().__init__(num_envs, seed=seed, device=device)


class ConstantReward(_ValueProbe, OneStepProbe):
    """Episodes of one step with reward 1 and observation 0. Tests whether the critic learns a constant: v = 1."""

    def dynamics(self, state_SN: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return reward 1, and terminate."""
        reward_N = torch.ones_like(state_SN[0])
        return state_SN.clone(), reward_N, reward_N > 0.0

    def observe(self, state_SN: Tensor) -> Tensor:
        """Return 0."""
        return state_SN

    def draw(self, state: list[float]) -> Frame:
        """Draw one cell."""
        return board([[GREEN]])


class ObservedReward(_ValueProbe):
    """Episodes of one step with the observation, 1 or -1, as reward. Tests whether the critic uses it: v(s) = s."""

    optimal_return = 0.0  # the mean over the observations
    initial_range = ((-1.0, 1.0),)  # its sign is the observation

    def optimal_value(self, observation: Tensor, gamma: float) -> Tensor:
        """Return v(s) = s, shape (N,)."""
        return observation[:, 0].clone()

    def dynamics(self, state_SN: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the observation as the reward, and terminate."""
        reward_N = self.observe(state_SN)[0]
        return state_SN.clone(), reward_N, torch.ones_like(reward_N, dtype=torch.bool)

    def observe(self, state_SN: Tensor) -> Tensor:
        """Return 1 or -1."""
        return torch.where(state_SN < 0.0, -1.0, 1.0)

    def draw(self, state: list[float]) -> Frame:
        """Draw one cell in the colour of the reward."""
        return board([[RED if state[0] < 0 else GREEN]])


class DelayedReward(_ValueProbe):
    """Episodes of two steps with reward 1 in the second step. Tests the discounting: v(0) = gamma, v(1) = 1.

    The observation is 0 in the first step and 1 in the second.
    """

    optimal_return = 1.0

    def optimal_value(self, observation: Tensor, gamma: float) -> Tensor:
        """Return gamma for observation 0 and 1 for observation 1, shape (N,)."""
        return gamma ** (1.0 - observation[:, 0])

    def dynamics(self, state_SN: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return reward 1 in the second step, and terminate there."""
        reward_N = state_SN[0].clone()
        state_SN = torch.ones_like(state_SN)
        return state_SN, reward_N, reward_N > 0.0

    def observe(self, state_SN: Tensor) -> Tensor:
        """Return the step number."""
        return state_SN

    def draw(self, state: list[float]) -> Frame:
        """Draw both steps."""
        return board([[WHITE, GREEN]], (0, state[0]))


class Bandit(OneStepProbe):
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
