"""Gridworld with action masks, on which agents with masks are tested.

Shapes: S numbers of a state, N environments, A actions.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from rein.envs import SimulatedEnvironment
from rein.envs.wrappers import Wrapper
from rein.ops.random import integers
from rein.types import TimeStep

SIZE = 4
WALLS = ((1, 1), (2, 3), (3, 0))
JUMPS = [(dx * k, dy * k) for k in (1, 2, 3) for dx, dy in ((0, 1), (0, -1), (1, 0), (-1, 0))]
FREE = [(x, y) for x in range(SIZE) for y in range(SIZE) if (x, y) not in WALLS]


class MaskedGrid(Wrapper):
    """Jump to a target on a board of 4 x 4 cells, 3 of which are walls.

    Each of 12 actions jumps 1, 2 or 3 cells up, down, right or left. A jump is valid if it ends on the board and not in
    a wall; about 60 % of the actions are invalid. Start and target are drawn for each episode. Every step has reward
    -1. An episode terminates at the target, and is truncated after `max_episode_steps`. An invalid action does not move
    and is counted in `invalid_actions`.

    The observation is a Dict of `observation`, (x, y, target x, target y), and `action_mask` (12,) int8.
    """

    def __init__(self, num_envs: int = 16, *, seed: int | None = None, max_episode_steps: int | None = 12) -> None:
        self.inner = _Grid(num_envs, seed=seed, max_episode_steps=max_episode_steps)
        self.invalid_actions = 0
        self._mask_N: Tensor | None = None  # (N, A) of the current observation

    @property
    def single_observation_space(self) -> spaces.Dict:
        """Dict of MultiDiscrete and MultiBinary."""
        return spaces.Dict(
            {"observation": spaces.MultiDiscrete([SIZE] * 4), "action_mask": spaces.MultiBinary(len(JUMPS))}
        )

    @property
    def config(self) -> dict[str, Any]:
        """Constructor options."""
        return {name: self.inner.config[name] for name in ("num_envs", "seed", "max_episode_steps")}

    @property
    def optimal_return(self) -> float:
        """Expected return of the best policy: minus the mean number of jumps from a start to another target."""
        cells = len(FREE)
        jumps = np.full((cells, cells), np.inf)
        np.fill_diagonal(jumps, 0.0)
        for i, (x, y) in enumerate(FREE):
            for dx, dy in JUMPS:
                if (x + dx, y + dy) in FREE:
                    jumps[i, FREE.index((x + dx, y + dy))] = 1.0
        for middle in range(cells):
            jumps = np.minimum(jumps, jumps[:, middle, None] + jumps[None, middle])
        return -float(jumps.sum() / (cells * (cells - 1)))

    def _begin(self, observation: Tensor, mask: Tensor | None) -> dict[str, Tensor]:
        return self._remember(_split(observation))

    def _step(self, action: Tensor, mask: Tensor | None) -> TimeStep:
        if self._mask_N is not None:
            invalid_N = self._mask_N.gather(1, action.unsqueeze(1)).squeeze(1) == 0
            self.invalid_actions += int((invalid_N if mask is None else invalid_N & mask).sum())
        time_step = self._step_inner(action, mask)
        return time_step._replace(
            observation=self._remember(_split(time_step.observation)),
            final_observation=_split(time_step.final_observation),
        )

    def _remember(self, observation: dict[str, Tensor]) -> dict[str, Tensor]:
        self._mask_N = observation["action_mask"].long()
        return observation

    def load_state_dict(self, state: Any) -> None:
        """Load the state of the inner environment."""
        self.inner.load_state_dict(state)
        self._mask_N = None


class _Grid(SimulatedEnvironment):
    """The board; observations are (x, y, target x, target y) and the mask, as numbers."""

    single_observation_space = spaces.Box(0.0, SIZE, (4 + len(JUMPS),))
    single_action_space = spaces.Discrete(len(JUMPS))

    def initial_state(self, seeds: Tensor) -> Tensor:
        start = integers(seeds, 0, len(FREE))
        target = (start + 1 + integers(seeds, 1, len(FREE) - 1)) % len(FREE)
        free_2F = torch.tensor(FREE, dtype=torch.float32).T
        return torch.cat([free_2F[:, start], free_2F[:, target]])

    def dynamics(self, state_SN: Tensor, action_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        jump_2N = torch.tensor(JUMPS, dtype=torch.float32)[action_N].T
        valid_N = _mask(state_SN).gather(0, action_N.unsqueeze(0))[0]
        place_2N = state_SN[:2] + jump_2N * valid_N
        terminated_N = (place_2N == state_SN[2:]).all(0)
        return torch.cat([place_2N, state_SN[2:]]), -torch.ones_like(valid_N), terminated_N

    def observe(self, state_SN: Tensor) -> Tensor:
        return torch.cat([state_SN, _mask(state_SN)])


def _mask(state_SN: Tensor) -> Tensor:
    """Return 1 for each valid jump and 0 otherwise, (A, N) float32."""
    free = torch.zeros(SIZE + 6, SIZE + 6)  # jumps of up to 3 cells end on it
    free[tuple(torch.tensor(FREE).T + 3)] = 1.0
    jump_2A1 = torch.tensor(JUMPS).T.unsqueeze(2)
    x_AN, y_AN = state_SN[:2].long().unsqueeze(1) + jump_2A1 + 3
    return free[x_AN, y_AN]


def _split(observation: Tensor) -> dict[str, Tensor]:
    return {"observation": observation[:, :4].long(), "action_mask": observation[:, 4:].to(torch.int8)}
