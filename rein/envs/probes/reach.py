"""Reach probe: tests whether a continuous policy finds the optimal gain of a linear-quadratic regulator.

Shapes: S numbers of a state, N environments, D dimensions.
"""

from __future__ import annotations

import math

import torch
from gymnasium import spaces
from torch import Tensor

from rein.envs.base.rendering import GREEN, WHITE, Frame, board
from rein.envs.probes.probe import Probe

_CELLS = 5  # cells per side of a frame


class Reach(Probe):
    """Move a point x in the box [-1, 1]^D to 0, with one or two dimensions D and actions a in [-1, 1]^D.

    An episode starts with x uniform in the box::

        x' = x + a, clipped to the box
        reward = -(|x'|^2 + |a|^2)

    An episode never terminates, and is truncated after `max_episode_steps`. The observation (N, D) is x. This is a
    linear-quadratic regulator: the best policy never reaches the bounds. With discount factor gamma it is::

        a = -k x
        v(x) = -k |x|^2
        k = gain(gamma) = (gamma - 2 + sqrt(gamma^2 + 4)) / (2 gamma)

    where k is the root of k = (1 + gamma k) / (2 + gamma k). For gamma = 1 it is 1 / golden ratio = 0.618.

    Raises ValueError for another number of dimensions.

    Source: Bertsekas 2012, Dynamic Programming and Optimal Control I, 4.1 (the Riccati equation).
    """

    def __init__(
        self,
        num_envs: int = 16,
        dimensions: int = 1,
        *,
        seed: int | None = None,
        max_episode_steps: int = 20,
        device: torch.device | str = "cpu",
    ) -> None:
        if dimensions not in (1, 2):
            raise ValueError(f"Reach(dimensions={dimensions}): give 1 or 2")
        self.dimensions = dimensions
        k = 0.0
        for _ in range(max_episode_steps):  # of the Riccati equation; after 20, k equals `gain(1.0)` exactly
            k = (1.0 + k) / (2.0 + k)
        self.optimal_return = -k * dimensions / 3.0
        self.single_observation_space = spaces.Box(-1.0, 1.0, (dimensions,))
        self.single_action_space = spaces.Box(-1.0, 1.0, (dimensions,))
        self.initial_range = [(-1.0, 1.0)] * dimensions
        super().__init__(num_envs, seed=seed, max_episode_steps=max_episode_steps, device=device)

    def optimal_value(self, observation: Tensor, gamma: float) -> Tensor:
        """Return the values (N,) of the observed positions x (N, D): -gain(gamma) times the squared norm of x."""
        return -gain(gamma) * observation.square().sum(1)

    def dynamics(self, state_SN: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Move by the action."""
        action_DN = action.T.clamp(-1.0, 1.0)
        state_SN = (state_SN + action_DN).clamp_(-1.0, 1.0)
        reward_N = -(state_SN.square() + action_DN.square()).sum(0)
        return state_SN, reward_N, torch.zeros_like(reward_N, dtype=torch.bool)

    def observe(self, state_SN: Tensor) -> Tensor:
        """Return the position."""
        return state_SN

    def draw(self, state: list[float]) -> Frame:
        """Draw the point and the goal."""
        middle, rows = _CELLS // 2, _CELLS if self.dimensions == 2 else 1
        cells = [[WHITE] * _CELLS for _ in range(rows)]
        cells[rows // 2][middle] = GREEN
        column, row = ((1.0 + x) * middle for x in (state[0], -state[-1]))
        return board(cells, (row if rows > 1 else 0, column))


def gain(gamma: float = 1.0) -> float:
    """Return the gain k of the best policy a = -k x of `Reach`, for a discount factor in (0, 1]."""
    return (gamma - 2.0 + math.sqrt(gamma * gamma + 4.0)) / (2.0 * gamma)
