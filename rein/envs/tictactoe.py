"""Tic-tac-toe, a game of two players.

Shapes: N games, P starts of games.
"""

from __future__ import annotations

import torch
from gymnasium import spaces
from torch import Tensor

from rein.envs.base.games import TurnBasedGame

_LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))


class TicTacToe(TurnBasedGame):
    """Tic-tac-toe: two players in turn mark a cell of a board of 3 x 3 cells. Three marks in a line win.

    The action is the number of the cell, row by row. The observation is a Dict of `observation` (18,), 1 in the cells
    of the player to move and, from entry 9 on, 1 in those of the other player, and `action_mask` (9,), 1 in free cells.
    The reward of a player who wins is 1.
    """

    single_observation_space = spaces.Dict(
        {"observation": spaces.MultiBinary(18), "action_mask": spaces.MultiBinary(9)}
    )
    single_action_space = spaces.Discrete(9)

    def initial_state(self, seeds: Tensor) -> Tensor:
        """Return empty boards (P, 18)."""
        return torch.zeros(len(seeds), 18, dtype=torch.int8, device=seeds.device)

    def observe(self, state: Tensor) -> dict[str, Tensor]:
        """Return the boards, and the free cells."""
        return {"observation": state, "action_mask": 1 - state[:, :9] - state[:, 9:]}

    def play(self, state: Tensor, action: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Mark a cell in each game."""
        own, other = state[:, :9].scatter(1, action[:, None], 1), state[:, 9:]
        line_83 = torch.tensor(_LINES, dtype=torch.int64, device=state.device)
        won_N = (own[:, line_83] == 1).all(-1).any(-1)
        full_N = (own + other == 1).all(1)
        return torch.cat([other, own], 1), won_N.to(torch.float32), won_N | full_N
