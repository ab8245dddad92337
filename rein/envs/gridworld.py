"""Gridworld: walk to a target on a board of cells, 5 x 5 by default.

Shapes: N environments, A actions, 2 for (x, y), K targets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from rein.envs.base.contract import (
    CLOSED,
    check_action,
    check_begun,
    check_open,
    check_rows_of,
    checked_num_envs,
    representation,
    restored,
)
from rein.envs.base.frames import GREEN, WHITE, Frame, board
from rein.envs.base.seeding import EpisodeSeeds
from rein.errors import check_keywords, explain
from rein.ops.random import integers
from rein.ops.trees import checked_device
from rein.types import TimeStep

_SIZE = 5
_MOVES = ((0, 1, 0, 0), (0, -1, 0, 0), (1, 0, 0, 0), (-1, 0, 0, 0))  # up, down, right, left; targets stay
_NEVER = 2**62
_COLUMN, _TARGET = range(2)  # counters of the random numbers that an episode draws from its seed


@explain("ENVIRONMENT_ATTRIBUTES")
class Gridworld:
    """N boards of `size` x `size` cells. The agent starts in the bottom row and walks to the target.

    An episode starts at y = 0. The column x is uniform on 0, ..., `start_columns` - 1, and the target is uniform among
    `possible_targets`. Use `start_columns=4` to reproduce the original Gridworld, which never drew the last column.
    Actions are 0 up (y + 1), 1 down, 2 right (x + 1) and 3 left, clipped to the board. After the move, with target
    (t_x, t_y)::

        reward = -(|t_x - x| + |t_y - y|)

    An episode terminates at the target, and is truncated after `max_episode_steps` moves.

    With `observation="cell"` the observation is (x, y, t_x, t_y), (N, 4) int64. With `observation="vector"` it is
    (N, 6) float32: x/s, y/s, t_x/s, t_y/s with s = `size` - 1, then 1 at the target and 0 elsewhere, then the Euclidean
    distance to the target as a fraction of the longest distance.

    Args:
        possible_targets: targets (x, y), one of which is drawn per episode.
        observation: "cell" for integers, "vector" for floats.
        size: cells of a side of the board.
        start_columns: number of columns in which episodes start; None for all.
        max_episode_steps: steps after which an episode is truncated; None for no limit.

    Raises ValueError for options out of range, and for targets that are off the board.
    """

    replayable = True
    bounding_box = (0, _SIZE - 1, 0, _SIZE - 1)  # min x, max x, min y, max y of the default size

    @check_keywords
    @torch.inference_mode(False)  # inference tensors cannot be modified outside of inference mode
    def __init__(
        self,
        num_envs: int = 16,
        possible_targets: Sequence[Sequence[int]] = ((2, 4),),
        *,
        seed: int | None = None,
        observation: str = "cell",
        size: int = _SIZE,
        start_columns: int | None = None,
        max_episode_steps: int | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.num_envs = num_envs = checked_num_envs(num_envs, "Gridworld")
        if observation not in ("cell", "vector"):
            raise ValueError(f"Gridworld(observation={observation!r}): give 'cell' or 'vector'")
        if size < 2 or size != int(size):
            raise ValueError(f"Gridworld(size={size}): give a whole number, 2 or more")
        start_columns = size if start_columns is None else start_columns
        if not 1 <= start_columns <= size:
            raise ValueError(f"Gridworld(start_columns={start_columns}): give 1 to {size}")
        if max_episode_steps is not None and max_episode_steps < 1:
            raise ValueError(f"Gridworld(max_episode_steps={max_episode_steps}): give 1 or more, or None for no limit")
        self.device = checked_device(device)
        self._kind = observation
        self.size, self.start_columns = int(size), int(start_columns)
        self.bounding_box = (0, self.size - 1, 0, self.size - 1)
        self.max_episode_steps = max_episode_steps
        self.single_action_space = spaces.Discrete(len(_MOVES))
        self.single_observation_space = (
            spaces.MultiDiscrete([self.size] * 4) if observation == "cell" else spaces.Box(0.0, 1.0, (6,), np.float32)
        )
        self.possible_targets = [self._on_board(target) for target in possible_targets]
        if not self.possible_targets:
            raise ValueError("Gridworld(possible_targets=[]): give at least one (x, y)")
        self._moves_A4 = torch.tensor(_MOVES, dtype=torch.int64, device=self.device)
        self._targets_K2 = torch.tensor(self.possible_targets, dtype=torch.int64, device=self.device)
        self._cell_N4 = torch.zeros(num_envs, 4, dtype=torch.int64, device=self.device)  # x, y, t_x, t_y
        self._steps_N = torch.zeros(num_envs, dtype=torch.int64, device=self.device)
        self._seeds = EpisodeSeeds(num_envs, seed, self.device, self._start)
        self._checked = False
        self._ended: str | None = None  # CLOSED after `close`

    @property
    def seed(self) -> int | None:
        """Random seed of all environments; None until given or drawn at the first reset."""
        return self._seeds.seed

    @property
    def episode_seeds(self) -> Tensor:
        """(N,) int64: seeds of the current episodes; -1 before the first reset."""
        return self._seeds.current

    @property
    def config(self) -> dict[str, Any]:
        """Constructor options, as JSON values."""
        return {
            "num_envs": self.num_envs,
            "possible_targets": [list(target) for target in self.possible_targets],
            "seed": self.seed,
            "observation": self._kind,
            **({} if self.size == _SIZE else {"size": self.size}),  # resumes runs older than the option
            "start_columns": self.start_columns,
            "max_episode_steps": self.max_episode_steps,
            "device": str(self.device),
        }

    def reset(self, seed: int | None = None) -> Tensor:
        """Begin the next episode of every environment, from episode 0 if `seed` is given. Returns the observation."""
        check_open("Gridworld", "reset", self._ended)
        if seed is not None:
            self._seeds.restart(seed)
        return self._begin(self._seeds.advance())

    def reset_to(self, episode_seeds: Tensor) -> Tensor:
        """Begin the episodes with these seeds (N,), for a replay. Later episodes are seeded as usual."""
        check_open("Gridworld", "reset_to", self._ended)
        return self._begin(self._seeds.override(episode_seeds))

    def reset_where(self, mask: Tensor) -> Tensor:
        """Begin the next episode where `mask` (N,) is True. Returns the current observation of all environments.

        Raises RuntimeError before the first reset.
        """
        self._check_begun("reset_where")
        check_rows_of("reset_where", mask, self.num_envs, torch.bool)
        self._cell_N4 = torch.where(mask[:, None], self._seeds.advance(mask), self._cell_N4)
        self._steps_N = self._steps_N.masked_fill(mask, 0)
        return self._observe(self._cell_N4)

    def apply_action(self, action: Tensor) -> TimeStep:
        """Step every environment with `action` (N,) int64, and reset those whose episode ended.

        Raises RuntimeError before the first reset and EnvironmentContractError for an invalid action.
        """
        return self._move(action, None)

    def apply_action_where(self, action: Tensor, mask: Tensor) -> TimeStep:
        """Step the environments where `mask` (N,) is True. The other rows do not change and are not valid.

        Raises RuntimeError before the first reset, EnvironmentContractError for an invalid action in any row, and
        ValueError for an invalid mask.
        """
        check_rows_of("apply_action_where", mask, self.num_envs, torch.bool)
        return self._move(action, mask)

    def encode(self, *, x: int, y: int, target: Sequence[int]) -> Tensor:
        """Return the observation at a position, as a batch of one: (1, 4) or (1, 6)."""
        return self._observe(
            torch.tensor([self._on_board((x, y)) + self._on_board(target)], dtype=torch.int64, device=self.device)
        )

    def render(self, index: int = 0) -> Frame:
        """Return an RGB frame (height, width, 3) of one environment, y upwards. The target is green, the agent blue."""
        x, y, target_x, target_y = self._cell_N4[index].tolist()
        cells = [[WHITE] * self.size for _ in range(self.size)]
        cells[self.size - 1 - target_y][target_x] = GREEN
        return board(cells, (self.size - 1 - y, x))

    def reseed(self, seed: int) -> None:
        """Set the random seed. Raises RuntimeError after the first reset."""
        self._seeds.reseed(seed)

    def close(self) -> None:
        """Refuse further steps. The environment holds no resources."""
        self._ended, self._checked = CLOSED, False  # the next step checks

    def state_dict(self) -> dict[str, Any]:
        """Return the state and the episode of every environment."""
        return {"seeds": self._seeds.state_dict(), "cell": self._cell_N4, "steps": self._steps_N}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of `state_dict`. Raises ValueError for another number of environments."""
        cell_N4, steps_N = restored(state, "cell", self._cell_N4), restored(state, "steps", self._steps_N)
        self._seeds.load_state_dict(state["seeds"])
        self._cell_N4, self._steps_N = cell_N4, steps_N

    def __repr__(self) -> str:
        return representation(self, f"num_envs={self.num_envs}")

    def _move(self, action: Tensor, mask_N: Tensor | None) -> TimeStep:
        if not self._checked or action.shape != (self.num_envs,):
            self._check(action)
        try:
            move_N4 = self._moves_A4.index_select(0, action)
        except (IndexError, RuntimeError):  # only the first action is checked in advance
            self._check(action)
            raise
        cell_N4 = move_N4.add_(self._cell_N4).clamp_(0, self.size - 1)
        distance_N = (cell_N4[:, 2:] - cell_N4[:, :2]).abs_().sum(1)
        steps_N = self._steps_N + 1
        terminated_N = distance_N == 0
        truncated_N = steps_N >= (self.max_episode_steps or _NEVER)
        if mask_N is not None:
            cell_N4 = torch.where(mask_N[:, None], cell_N4, self._cell_N4)
            distance_N, steps_N = distance_N * mask_N, torch.where(mask_N, steps_N, self._steps_N)
            terminated_N, truncated_N = terminated_N & mask_N, truncated_N & mask_N
        ended_N = terminated_N | truncated_N
        self._cell_N4 = torch.where(ended_N[:, None], self._seeds.advance(ended_N), cell_N4)
        self._steps_N = steps_N.masked_fill_(ended_N, 0)
        return TimeStep(
            observation=self._observe(self._cell_N4),
            reward=distance_N.to(torch.float32).neg_(),
            terminated=terminated_N,
            truncated=truncated_N,
            final_observation=self._observe(cell_N4),
            valid=torch.ones_like(terminated_N) if mask_N is None else mask_N.clone(),
            info={},
        )

    def _begin(self, start_N4: Tensor) -> Tensor:
        self._cell_N4 = start_N4
        self._steps_N = torch.zeros_like(self._steps_N)
        return self._observe(start_N4)

    def _start(self, seeds: Tensor) -> Tensor:
        """Return the first states (..., 4) of the episodes with these seeds (...)."""
        x = integers(seeds, _COLUMN, self.start_columns)
        target = self._targets_K2[integers(seeds, _TARGET, len(self._targets_K2))]
        return torch.cat([torch.stack([x, torch.zeros_like(x)], -1), target], -1)

    def _observe(self, cell_N4: Tensor) -> Tensor:
        if self._kind == "cell":
            return cell_N4.clone()
        scaled_N4 = cell_N4.to(torch.float32) / (self.size - 1)
        squared_N1 = (scaled_N4[:, 2:] - scaled_N4[:, :2]).square().sum(1, keepdim=True)
        return torch.cat([scaled_N4, (squared_N1 == 0).to(scaled_N4.dtype), (squared_N1 / 2).sqrt()], 1)

    def _check(self, action: Tensor) -> None:
        self._check_begun("apply_action")
        check_action(action, self.num_envs, self.single_action_space)
        self._checked = True

    def _check_begun(self, method: str) -> None:
        check_begun("Gridworld", method, self._seeds.started, self._ended)

    def _on_board(self, cell: Sequence[int]) -> tuple[int, int]:
        x, y = (int(c) for c in cell)
        if not (0 <= x < self.size and 0 <= y < self.size):
            raise ValueError(f"Gridworld: ({x}, {y}) is off the board, which has x and y from 0 to {self.size - 1}")
        return x, y
