"""Turn-based games of two players.

Shapes: N games, R games of them, P starts of games, S a state, A actions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from gymnasium import spaces
from torch import Tensor

from rein.envs.base.contract import restored
from rein.types import Tree


class Game(Protocol):
    """Game that `SelfPlay` and `tournament` can play."""

    single_observation_space: Any
    single_action_space: Any

    @property
    def name(self) -> str:
        """Name of the game."""
        ...

    def games(self, num_envs: int, device: torch.device) -> Games:
        """Return N games, which `Games.begin` begins."""
        ...


class Games(ABC):
    """N games in progress. Players are numbered 0 and 1."""

    @property
    @abstractmethod
    def player(self) -> Tensor:
        """(N,) int64: players to move. Undefined in games that are over."""

    @abstractmethod
    def begin(self, row_R: Tensor, seed_R: Tensor) -> None:
        """Begin games in these rows (R,) with these seeds (R,) int64."""

    @abstractmethod
    def observe(self, row_R: Tensor, player_R: Tensor) -> Tree:
        """Return the observations of these players (R,), with `action_mask` (R, A)."""

    @abstractmethod
    def play(self, row_R: Tensor, action_R: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Play one move in each of these games.

        Returns:
            rewards (R, 2) float32 of both players, terminated (R,) bool, truncated (R,) bool.
        """

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """See `Stateful`."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Stateful`. Raises ValueError for another number of games."""

    @abstractmethod
    def close(self) -> None:
        """Release all resources. May be called twice."""


class TurnBasedGame(ABC):
    """Base class of zero-sum games of two players who move in turn. All methods are pure functions on N games.

    Observations are a Dict with the entries `observation` and `action_mask`, both from the point of view of the player
    to move. Agents are built from a game as from an environment, `rein.PPO(game)`.
    """

    single_observation_space: spaces.Dict
    single_action_space: spaces.Discrete

    @abstractmethod
    def initial_state(self, seeds: Tensor, /) -> Tensor:
        """Return the first states `(P, *S)` of the games with these seeds (P,) int64."""

    @abstractmethod
    def observe(self, state: Tensor, /) -> dict[str, Tensor]:
        """Return the observations of the players to move, with `action_mask` (N, A)."""

    @abstractmethod
    def play(self, state: Tensor, action: Tensor, /) -> tuple[Tensor, Tensor, Tensor]:
        """Play one move in each game. Return new tensors.

        Returns:
            next state `(N, *S)`, reward (N,) float32 of the player who moved, over (N,) bool.
        """

    @property
    def name(self) -> str:
        """Name of the class."""
        return type(self).__name__

    def games(self, num_envs: int, device: torch.device) -> Games:
        """Return N games, which `SelfPlay` plays."""
        return _SimulatedGames(self, num_envs, device)


class _SimulatedGames(Games):
    """N games of a `TurnBasedGame`."""

    def __init__(self, game: TurnBasedGame, num_envs: int, device: torch.device) -> None:
        self._game = game
        self._player_N = torch.zeros(num_envs, dtype=torch.int64, device=device)
        self._state = game.initial_state(self._player_N)

    @property
    def player(self) -> Tensor:
        return self._player_N

    def begin(self, row_R: Tensor, seed_R: Tensor) -> None:
        self._state = self._state.index_copy(0, row_R, self._game.initial_state(seed_R))
        self._player_N = self._player_N.index_fill(0, row_R, 0)

    def observe(self, row_R: Tensor, player_R: Tensor) -> Tree:
        return self._game.observe(self._state[row_R])  # in a game that is over, of the player who would be next

    def play(self, row_R: Tensor, action_R: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        player_R = self._player_N[row_R]
        state_R, reward_R, over_R = self._game.play(self._state[row_R], action_R)
        self._state = self._state.index_copy(0, row_R, state_R)
        self._player_N = self._player_N.index_copy(0, row_R, 1 - player_R)
        first_R = torch.where(player_R == 0, reward_R, -reward_R)
        return torch.stack([first_R, -first_R], 1), over_R, torch.zeros_like(over_R)

    def state_dict(self) -> dict[str, Any]:
        return {"state": self._state, "player": self._player_N}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        state_N, player_N = restored(state, "state", self._state), restored(state, "player", self._player_N)
        self._state, self._player_N = state_N, player_N

    def close(self) -> None:
        pass
