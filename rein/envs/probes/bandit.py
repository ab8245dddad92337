"""A bandit: one pull, and one of the arms pays. Is the gradient of the policy right, and does it see the observation?

Shapes: S numbers of a state, N environments, K arms.
"""

from __future__ import annotations

import torch
from gymnasium import spaces
from torch import Tensor

from rein.envs.base.drawing import GREEN, WHITE, Frame, board
from rein.envs.probes.base import Probe, choices, chosen, one_hot


class Bandit(Probe):
    """Episodes of one step, which pay 1 for one arm of `arms` and 0 for the others, and terminate.

    The observation (N, K) is 1 at the arm that pays, drawn anew for each episode. With `contextual=False` it is 0
    everywhere and the last arm always pays, so nothing is left to learn but that. `continuous=True` takes actions in
    [-1, 1], cut into equal parts from the first arm to the last.

    The best return is 1, that of random pulls 1 / arms.

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
        ]  # the whole part is the arm that pays
        super().__init__(num_envs, seed=seed, device=device)

    @property
    def optimal_return(self) -> float:
        """1: the arm that pays is seen, or always the same."""
        return 1.0

    def optimal_value(self, observation: Tensor, gamma: float) -> Tensor:
        """(N,) v(s) = 1, for an episode is one step."""
        return torch.ones_like(observation[:, 0])

    def dynamics(self, state_SN: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Pay 1 for the right arm, and terminate."""
        hit_N = chosen(action, self.arms) == state_SN[0].long()
        return state_SN.clone(), hit_N.to(torch.float32), torch.ones_like(hit_N)

    def observe(self, state_SN: Tensor) -> Tensor:
        """Return 1 at the arm that pays, or zeros."""
        if self.contextual:
            return one_hot(state_SN[0], self.arms)
        return torch.zeros(self.arms, state_SN.shape[1], dtype=torch.float32, device=state_SN.device)

    def draw(self, state: list[float]) -> Frame:
        """Draw one cell for each arm."""
        return board([[GREEN if arm == int(state[0]) else WHITE for arm in range(self.arms)]])
