"""Gridworld: walk to a target on a board of cells, 5 x 5 by default.

Shapes: N environments, P episode seeds, A actions, 4 for (x, y, t_x, t_y), K targets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from rein.envs.base.contract import restored
from rein.envs.base.rendering import GREEN, WHITE, Frame, board
from rein.envs.base.simulation import SimulatedEnvironment, transposed
from rein.ops.random import integers
from rein.ops.trees import checked_device

_SIZE = 5
_MOVES = ((0, 1), (0, -1), (1, 0), (-1, 0))  # up, down, right, left
_COLUMN, _TARGET = range(2)  # counters of the random numbers that an episode draws from its seed


class Gridworld(SimulatedEnvironment):
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

    single_action_space = spaces.Discrete(len(_MOVES))
    initial_range = ()
    action_values = tuple(range(len(_MOVES)))  # `dynamics` looks moves up
    bounding_box = (0, _SIZE - 1, 0, _SIZE - 1)  # min x, max x, min y, max y of the default size

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
        if observation not in ("cell", "vector"):
            raise ValueError(f"Gridworld(observation={observation!r}): give 'cell' or 'vector'")
        if size < 2 or size != int(size):
            raise ValueError(f"Gridworld(size={size}): give a whole number, 2 or more")
        start_columns = size if start_columns is None else start_columns
        if not 1 <= start_columns <= size:
            raise ValueError(f"Gridworld(start_columns={start_columns}): give 1 to {size}")
        self.observation = observation
        self.size = int(size)
        self.start_columns = int(start_columns)
        self.bounding_box = (0, self.size - 1, 0, self.size - 1)
        self.possible_targets = [self._on_board(target) for target in possible_targets]
        if not self.possible_targets:
            raise ValueError("Gridworld(possible_targets=[]): give at least one (x, y)")
        self.single_observation_space = (
            spaces.MultiDiscrete([self.size] * 4) if observation == "cell" else spaces.Box(0.0, 1.0, (6,), np.float32)
        )
        device = checked_device(device)
        self._moves_2A = torch.tensor(_MOVES, dtype=torch.float32, device=device).T.contiguous()
        self._targets_K2 = torch.tensor(self.possible_targets, dtype=torch.int64, device=device)
        super().__init__(num_envs, seed=seed, max_episode_steps=max_episode_steps, device=device)

    @property
    def config(self) -> dict[str, Any]:
        """Constructor options, as JSON values."""
        options = super().config
        if self.size == _SIZE:  # resumes runs older than the option
            del options["size"]
        return options

    def initial_state(self, seeds: Tensor) -> Tensor:
        """Return the starts and targets (4, P) of episodes."""
        x_P = integers(seeds, _COLUMN, self.start_columns)
        target_P2 = self._targets_K2[integers(seeds, _TARGET, len(self._targets_K2))]
        return torch.stack([x_P, torch.zeros_like(x_P), *target_P2.unbind(1)]).to(torch.float32)

    def dynamics(self, state_4N: Tensor, action_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Move by one cell."""
        place_2N = (state_4N[:2] + self._moves_2A[:, action_N.long()]).clamp_(0, self.size - 1)
        distance_N = (state_4N[2:] - place_2N).abs_().sum(0)
        return torch.cat([place_2N, state_4N[2:]]), distance_N.neg(), distance_N == 0

    def observe(self, state_4N: Tensor) -> Tensor:
        """Return the cells, or positions as fractions of the board with the distance to the target."""
        if self.observation == "cell":
            return state_4N.to(torch.int64)
        scaled_4N = state_4N / (self.size - 1)
        squared_1N = (scaled_4N[2:] - scaled_4N[:2]).square().sum(0, keepdim=True)
        return torch.cat([scaled_4N, (squared_1N == 0).to(torch.float32), (squared_1N / 2).sqrt()])

    def encode(self, *, x: int, y: int, target: Sequence[int]) -> Tensor:
        """Return the observation at a position, as a batch of one: (1, 4) or (1, 6)."""
        return transposed(self.observe(self._tensor([self._on_board((x, y)) + self._on_board(target)]).T))

    def draw(self, state: list[float]) -> Frame:
        """Draw the board, y upwards. The target is green, and the agent is a blue disc."""
        x, y, target_x, target_y = map(int, state)
        cells = [[WHITE] * self.size for _ in range(self.size)]
        cells[self.size - 1 - target_y][target_x] = GREEN
        return board(cells, (self.size - 1 - y, x))

    def state_dict(self) -> dict[str, Any]:
        """Return the cell and the episode of every environment."""
        state = super().state_dict()
        return {"seeds": state["seeds"], "cell": state["state"].T.to(torch.int64), "steps": state["steps"]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of `state_dict`. Raises ValueError for another number of environments."""
        cell_N4 = restored(state, "cell", self._state_SN.T)
        super().load_state_dict({**state, "state": cell_N4.T})

    def _on_board(self, cell: Sequence[int]) -> tuple[int, int]:
        x, y = (int(c) for c in cell)
        if not (0 <= x < self.size and 0 <= y < self.size):
            raise ValueError(f"Gridworld: ({x}, {y}) is off the board, which has x and y from 0 to {self.size - 1}")
        return x, y
