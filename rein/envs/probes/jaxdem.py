"""The two tasks of the PPO tests of JaxDEM, reproduced so that results can be compared.

Both have one continuous action, and the best action is positive. Every episode starts in the same state.

Source: JaxDEM (cdelv/JaxDEM), tests of its PPO, 2026.

Shapes: S numbers of a state, N environments.
"""

from __future__ import annotations

import math

import torch
from gymnasium import spaces
from torch import Tensor

from rein.envs.base.rendering import GREEN, RED, WHITE, Frame, board
from rein.envs.probes.probe import OneStepProbe, Probe

END, PRIZE, COST, STRIDE = 5.0, 10.0, 0.1, 2.0


class SignBandit(OneStepProbe):
    """Episodes of one step with reward 1 for an action in (0, 1] and -1 for an action in [-1, 0].

    The observation (N, 1) is 0. The best return is 1, and random actions have the mean return 0. JaxDEM requires a mean
    action above 0.5 and a value above 0.5 after 100 rounds of 128 environments and 2 steps.
    """

    def __init__(self, num_envs: int = 128, *, seed: int | None = None, device: torch.device | str = "cpu") -> None:
        self.single_observation_space = spaces.Box(-1.0, 1.0, (1,))
        self.single_action_space = spaces.Box(-1.0, 1.0, (1,))
        super().__init__(num_envs, seed=seed, device=device)

    def dynamics(self, state_SN: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the sign of the action as the reward, and terminate."""
        reward_N = torch.where(action[:, 0] > 0.0, 1.0, -1.0)
        return state_SN.clone(), reward_N, torch.ones_like(reward_N, dtype=torch.bool)

    def observe(self, state_SN: Tensor) -> Tensor:
        """Return 0."""
        return state_SN

    def draw(self, state: list[float]) -> Frame:
        """Draw one cell for each sign."""
        return board([[RED, GREEN]])


class OpenCorridor(Probe):
    """Unbounded line with moves in [-2, 2]. Reaching 5 has reward 10 and terminates; other rewards are -0.1.

    An episode starts at 0. The observation (N, 1) is the position, which has no lower bound. By default episodes are
    not truncated. The best return is 9.8, in three steps. JaxDEM requires a mean of the unsquashed Gaussian above 0.55
    at the start, after 300 rounds of 256 environments and 8 steps.
    """

    optimal_return = PRIZE - COST * (math.ceil(END / STRIDE) - 1)  # 9.8: two steps at -0.1, and a third to the end

    def __init__(
        self,
        num_envs: int = 256,
        *,
        seed: int | None = None,
        max_episode_steps: int | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.single_observation_space = spaces.Box(-math.inf, math.inf, (1,))
        self.single_action_space = spaces.Box(-STRIDE, STRIDE, (1,))
        super().__init__(num_envs, seed=seed, max_episode_steps=max_episode_steps, device=device)

    def optimal_value(self, observation: Tensor, gamma: float) -> Tensor:
        """Return the discounted return (N,) of the shortest path from the observed positions (N, 1), for gamma < 1."""
        before_N = ((END - observation[:, 0]) / STRIDE - 1e-4).ceil() - 1.0  # 1e-4: rounding errors are not rounded up
        discount_N = gamma**before_N
        return discount_N * PRIZE - COST * (1.0 - discount_N) / (1.0 - gamma)

    def dynamics(self, state_SN: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Move by the action."""
        state_SN = state_SN + action.T.clamp(-STRIDE, STRIDE)
        reached_N = state_SN[0] >= END
        return state_SN, torch.where(reached_N, PRIZE, -COST), reached_N

    def observe(self, state_SN: Tensor) -> Tensor:
        """Return the position."""
        return state_SN.clone()

    def draw(self, state: list[float]) -> Frame:
        """Draw the line and the position."""
        cells = int(END)  # on both sides of the start; positions further left are drawn at the edge
        return board([[WHITE] * 2 * cells + [GREEN]], (0, cells + max(state[0], -END)))
