"""Gridworld: walk to a target on a board of 5 x 5 cells, N boards at once.

Shapes: N environments, A actions, 2 for (x, y), K targets, P pixels along an edge of a frame.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from rein.ops.random import integers
from rein.rollout.contract import check_action, restored
from rein.rollout.seeds import EpisodeSeeds
from rein.types import TimeStep

_SIZE = 5
_MOVES = ((0, 1, 0, 0), (0, -1, 0, 0), (1, 0, 0, 0), (-1, 0, 0, 0))  # up, down, right, left; targets stay
_NEVER = 2**62
_COLUMN, _TARGET = range(2)  # what an episode draws from its seed, by counter
_CELL = 48  # pixels
_WHITE, _LINE, _GREEN, _BLUE = (255, 255, 255), (205, 205, 210), (88, 175, 98), (45, 90, 190)


class Gridworld:
    """N boards of 5 x 5 cells: start in the bottom row, reach the target.

    An episode starts at y = 0 with x uniform on 0, ..., `start_columns` - 1 (the ancestor's Gridworld never drew its
    last column: `start_columns=4`) and a target uniform among `possible_targets`. Actions are 0 up (y + 1), 1 down,
    2 right (x + 1), 3 left, clipped to the board. After the move, with target (t_x, t_y),

        reward = -(|t_x - x| + |t_y - y|),    terminated where it is 0,

    and truncated after `max_episode_steps` moves, if given. `observation="cell"` gives (N, 4) int64 (x, y, t_x, t_y);
    "vector" gives (N, 6) float32 (x/4, y/4, t_x/4, t_y/4, 1 at the target and 0 elsewhere, Euclidean distance to the
    target as a fraction of the longest).

    Raises ValueError for options out of range.
    """

    replayable = True
    bounding_box = (0, _SIZE - 1, 0, _SIZE - 1)  # least and greatest x, least and greatest y

    def __init__(
        self,
        num_envs: int = 16,
        possible_targets: Sequence[Sequence[int]] = ((2, 4),),
        *,
        seed: int | None = None,
        observation: str = "cell",
        start_columns: int = _SIZE,
        max_episode_steps: int | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        if num_envs < 1:
            raise ValueError(f"Gridworld(num_envs={num_envs}): give 1 or more")
        if observation not in ("cell", "vector"):
            raise ValueError(f"Gridworld(observation={observation!r}): give 'cell' or 'vector'")
        if not 1 <= start_columns <= _SIZE:
            raise ValueError(f"Gridworld(start_columns={start_columns}): give 1 to {_SIZE}")
        if max_episode_steps is not None and max_episode_steps < 1:
            raise ValueError(f"Gridworld(max_episode_steps={max_episode_steps}): give 1 or more, or None for no limit")
        self.num_envs = num_envs
        self.device = torch.device(device)
        self._kind = observation
        self.start_columns = start_columns
        self.max_episode_steps = max_episode_steps
        self.single_action_space = spaces.Discrete(len(_MOVES))
        self.single_observation_space = (
            spaces.MultiDiscrete([_SIZE] * 4) if observation == "cell" else spaces.Box(0.0, 1.0, (6,), np.float32)
        )
        self.possible_targets = [_on_board(target) for target in possible_targets]
        if not self.possible_targets:
            raise ValueError("Gridworld(possible_targets=[]): give at least one (x, y)")
        self._moves_A4 = torch.tensor(_MOVES, device=self.device)
        self._targets_K2 = torch.tensor(self.possible_targets, device=self.device)
        self._cell_N4 = torch.zeros(num_envs, 4, dtype=torch.int64, device=self.device)  # x, y, t_x, t_y
        self._steps_N = torch.zeros(num_envs, dtype=torch.int64, device=self.device)
        self._seeds = EpisodeSeeds(num_envs, seed, self.device, self._start)
        self._checked = False

    @property
    def seed(self) -> int | None:
        """The seed of all streams; None until given, drawn at the first reset if it never was."""
        return self._seeds.seed

    @property
    def episode_seeds(self) -> Tensor:
        """(N,) int64: what each environment's current episode was reset with; -1 before the first reset."""
        return self._seeds.current

    @property
    def config(self) -> dict[str, Any]:
        """What it was built with, as JSON."""
        return {
            "num_envs": self.num_envs,
            "possible_targets": [list(target) for target in self.possible_targets],
            "seed": self.seed,
            "observation": self._kind,
            "start_columns": self.start_columns,
            "max_episode_steps": self.max_episode_steps,
            "device": str(self.device),
        }

    def reset(self, seed: int | None = None) -> Tensor:
        """Begin the next episode of every environment; `seed` starts all streams anew. Returns the observation."""
        if seed is not None:
            self._seeds.restart(seed)
        return self._begin(self._seeds.advance())

    def reset_to(self, episode_seeds: Tensor) -> Tensor:
        """Begin the episodes that these seeds (N,) give, for a replay; what follows them follows the streams."""
        return self._begin(self._seeds.override(episode_seeds))

    def apply_action(self, action: Tensor) -> TimeStep:
        """Move on every board by `action` (N,) int64.

        Raises RuntimeError before the first reset and EnvironmentContractError for what is no action.
        """
        if not self._checked or action.shape != (self.num_envs,):
            self._check(action)
        cell_N4 = (self._cell_N4 + self._moves_A4[action]).clamp_(0, _SIZE - 1)
        distance_N = (cell_N4[:, 2:] - cell_N4[:, :2]).abs_().sum(1)
        steps_N = self._steps_N + 1
        terminated_N = distance_N == 0
        truncated_N = steps_N >= (self.max_episode_steps or _NEVER)
        ended_N = terminated_N | truncated_N
        self._cell_N4 = torch.where(ended_N[:, None], self._seeds.advance(ended_N), cell_N4)
        self._steps_N = steps_N.masked_fill_(ended_N, 0)
        return TimeStep(
            observation=self._observe(self._cell_N4),
            reward=distance_N.to(torch.float32).neg_(),
            terminated=terminated_N,
            truncated=truncated_N,
            final_observation=self._observe(cell_N4),
            valid=torch.ones_like(terminated_N),
            info={},
        )

    def encode(self, *, x: int, y: int, target: Sequence[int]) -> Tensor:
        """The observation at a position, as a batch of one: (1, 4) or (1, 6)."""
        return self._observe(torch.tensor([_on_board((x, y)) + _on_board(target)], device=self.device))

    def render(self, index: int = 0) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """An RGB frame (P, P, 3) of one environment: the walker a blue disc, the target a green cell, y upwards."""
        x, y, target_x, target_y = self._cell_N4[index].tolist()
        frame_PP3 = np.full((_SIZE * _CELL, _SIZE * _CELL, 3), _WHITE, np.uint8)
        _cell(frame_PP3, target_x, target_y)[:] = _GREEN
        row_P1, column_1P = np.ogrid[:_CELL, :_CELL]
        disc = np.hypot(row_P1 - (_CELL - 1) / 2, column_1P - (_CELL - 1) / 2) < 0.32 * _CELL
        _cell(frame_PP3, x, y)[disc] = _BLUE
        frame_PP3[::_CELL] = frame_PP3[:, ::_CELL] = frame_PP3[-1] = frame_PP3[:, -1] = _LINE
        return frame_PP3

    def reseed(self, seed: int) -> None:
        """Take `seed` for all streams; RuntimeError after the first reset."""
        self._seeds.reseed(seed)

    def close(self) -> None:
        """Nothing to release."""

    def state_dict(self) -> dict[str, Any]:
        """Where every board stands, and its episode."""
        return {"seeds": self._seeds.state_dict(), "cell": self._cell_N4, "steps": self._steps_N}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave; ValueError for another number of environments."""
        cell_N4, steps_N = restored(state, "cell", self._cell_N4), restored(state, "steps", self._steps_N)
        self._seeds.load_state_dict(state["seeds"])
        self._cell_N4, self._steps_N = cell_N4, steps_N

    def _begin(self, start_N4: Tensor) -> Tensor:
        self._cell_N4 = start_N4
        self._steps_N = torch.zeros_like(self._steps_N)
        return self._observe(start_N4)

    def _start(self, seeds: Tensor) -> Tensor:
        """Where the episodes of seeds (...) begin: (..., 4)."""
        x = integers(seeds, _COLUMN, self.start_columns)
        target = self._targets_K2[integers(seeds, _TARGET, len(self._targets_K2))]
        return torch.cat([torch.stack([x, torch.zeros_like(x)], -1), target], -1)

    def _observe(self, cell_N4: Tensor) -> Tensor:
        if self._kind == "cell":
            return cell_N4.clone()
        scaled_N4 = cell_N4.to(torch.float32) / (_SIZE - 1)
        squared_N1 = (scaled_N4[:, 2:] - scaled_N4[:, :2]).square().sum(1, keepdim=True)
        return torch.cat([scaled_N4, (squared_N1 == 0).to(scaled_N4.dtype), (squared_N1 / 2).sqrt()], 1)

    def _check(self, action: Tensor) -> None:
        if not self._seeds.started:
            raise RuntimeError("Gridworld.apply_action: call reset() first")
        check_action(action, self.num_envs, self.single_action_space)
        self._checked = True


def _on_board(cell: Sequence[int]) -> tuple[int, int]:
    x, y = (int(c) for c in cell)
    if not (0 <= x < _SIZE and 0 <= y < _SIZE):
        raise ValueError(f"Gridworld: ({x}, {y}) is off the board, which has x and y from 0 to {_SIZE - 1}")
    return x, y


def _cell(frame_PP3: np.ndarray[Any, Any], x: int, y: int) -> np.ndarray[Any, Any]:
    top = (_SIZE - 1 - y) * _CELL
    return frame_PP3[top : top + _CELL, x * _CELL : (x + 1) * _CELL]
