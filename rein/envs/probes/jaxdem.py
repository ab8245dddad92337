"""The two tasks that JaxDEM's tests ask an agent to learn, as they are there, so that results can be compared.

Both take a number as action and pay for its sign in the end. Their starting points are the same in every episode.

Source: JaxDEM (cdelv/JaxDEM), tests of its PPO, 2026.

Shapes: S numbers of a state, N environments.
"""

from __future__ import annotations

import math

import torch
from gymnasium import spaces
from torch import Tensor

from rein.envs.base.drawing import GREEN, RED, WHITE, Frame, board
from rein.envs.probes.base import Probe

END, PRIZE, COST, STRIDE = 5.0, 10.0, 0.1, 2.0


class SignBandit(Probe):
    """Episodes of one step, which pay 1 for an action in [-1, 1] above 0 and -1 for any other, and terminate.

    The observation (N, 1) is 0. The best return is 1, that of random actions 0. JaxDEM asks for a mean action above 0.5
    and a value above 0.5 after 100 rounds of 128 environments and 2 steps.
    """

    def __init__(self, num_envs: int = 128, *, seed: int | None = None, device: torch.device | str = "cpu") -> None:
        self.single_observation_space = spaces.Box(-1.0, 1.0, (1,))
        self.single_action_space = spaces.Box(-1.0, 1.0, (1,))
        self.initial_range = [(0.0, 0.0)]
        super().__init__(num_envs, seed=seed, device=device)

    @property
    def optimal_return(self) -> float:
        """1: any action above 0."""
        return 1.0

    def optimal_value(self, observation: Tensor, gamma: float) -> Tensor:
        """(N,) v(s) = 1, for an episode is one step."""
        return torch.ones_like(observation[:, 0])

    def dynamics(self, state_SN: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Pay the sign of the action, and terminate."""
        reward_N = torch.where(action[:, 0] > 0.0, 1.0, -1.0)
        return state_SN.clone(), reward_N, torch.ones_like(reward_N, dtype=torch.bool)

    def observe(self, state_SN: Tensor) -> Tensor:
        """Return 0."""
        return state_SN

    def draw(self, state: list[float]) -> Frame:
        """Draw one cell for each sign."""
        return board([[RED, GREEN]])


class OpenCorridor(Probe):
    """A line without ends, walked from 0 by actions in [-2, 2]: reaching 5 pays 10 and terminates.

    Every other step costs 0.1. The observation (N, 1) is the position, which may be anything below 5. Nothing bounds
    the length of an episode unless `max_episode_steps` does. The best return is 9.8, in three steps. JaxDEM asks for a
    mean above 0.55 at the start, of the Gaussian before it is squashed, after 300 rounds of 256 environments and 8
    steps.
    """

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
        self.initial_range = [(0.0, 0.0)]
        super().__init__(num_envs, seed=seed, max_episode_steps=max_episode_steps, device=device)

    @property
    def optimal_return(self) -> float:
        """9.8: two steps that cost 0.1, and a third to the end."""
        return PRIZE - COST * (math.ceil(END / STRIDE) - 1)

    def optimal_value(self, observation: Tensor, gamma: float) -> Tensor:
        """(N,) the discounted return of the fewest steps from what is observed, (N, 1); for gamma below 1."""
        before_N = ((END - observation[:, 0]) / STRIDE - 1e-4).ceil() - 1.0  # what is rounded up is no rounding error
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
        cells = int(END)  # left of the start, too: who has gone further is shown at the edge
        return board([[WHITE] * 2 * cells + [GREEN]], (0, cells + max(state[0], -END)))
