"""Games of PettingZoo in which two players take turns, for self-play.

Shapes: N games, R games of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from rein.envs.base.contract import restored
from rein.envs.base.games import Games
from rein.envs.base.seeding import UNKNOWN
from rein.envs.gymnasium.adapter import name_of
from rein.envs.host.results import ended_flags
from rein.errors import EnvironmentContractError
from rein.ops.trees import leaves, to_device
from rein.spaces import ACTION_MASK, entry
from rein.spaces.conversion import Codec, column
from rein.spaces.masks import as_mask, check_masks, folded, folded_space, mask_space
from rein.types import Tree

_FLOAT = np.dtype(np.float32)


class PettingZooGame:
    """Game of two players from PettingZoo, an AEC environment, for `rein.SelfPlay` and `rein.tournament`.

    Agents are built from the game, `rein.PPO(game)`. Observations have the entry `action_mask`. If the environment has
    no such entry, it comes from `info["action_mask"]`, and a missing mask allows all moves. A game is over when a
    player is terminated or truncated.

    Example::

        from pettingzoo.classic import connect_four_v3

        game = rein.envs.PettingZooGame(connect_four_v3.env)
        agent = rein.PPO(game, seed=0)
        env = rein.SelfPlay(game, num_envs=8, opponents=rein.OpponentPool(agent), seed=0)

    Args:
        make_aec: function that returns an AEC environment.
        **make_kwargs: keyword arguments of the function.

    Raises:
        TypeError: if the function does not return an AEC environment in which agents take turns, or if the players do
            not have the same spaces, with actions in a `Discrete` that starts at 0.
        ValueError: if the environment does not have two players, or if the function returns the same environment twice.
    """

    def __init__(self, make_aec: Callable[..., Any], **make_kwargs: Any) -> None:
        if not callable(make_aec):
            raise TypeError(
                f"{make_aec!r:.80}: give a function that returns an AEC environment, such as connect_four_v3.env"
            )
        self._name, self._make, self._make_kwargs = name_of(make_aec), make_aec, make_kwargs
        environment = self.make()
        self.players = _players(environment, self._name)
        of_players = [(environment.observation_space(x), environment.action_space(x)) for x in self.players]
        environment.close()
        space, self.single_action_space = of_players[0]
        if of_players[0] != of_players[1]:
            raise TypeError(f"{self._name}: the spaces of the players differ: {of_players[0]} and {of_players[1]}")
        if not isinstance(self.single_action_space, spaces.Discrete) or self.single_action_space.start != 0:
            raise TypeError(f"{self._name}: expected actions in a Discrete from 0, got {self.single_action_space}")
        self.added_mask = None if entry(space, ACTION_MASK) is not None else mask_space(self.single_action_space)
        self.single_observation_space: Any = space if self.added_mask is None else folded_space(space, self.added_mask)

    @property
    def name(self) -> str:
        """Module and name of the function."""
        return self._name

    def make(self) -> Any:
        """Return a new AEC environment."""
        return self._make(**self._make_kwargs)

    def games(self, num_envs: int, device: torch.device) -> Games:
        """Return N games, which `SelfPlay` plays."""
        return _PettingZooGames(self, num_envs, device)

    def __repr__(self) -> str:
        return f"PettingZooGame({self._name!r})"


class _PettingZooGames(Games):
    """N games of a `PettingZooGame`, with the moves of each. A loaded game repeats its moves."""

    def __init__(self, game: PettingZooGame, num_envs: int, device: torch.device) -> None:
        self._game, self._device = game, device
        self._envs = [game.make() for _ in range(num_envs)]
        if len({id(env) for env in self._envs}) < num_envs:
            raise ValueError(
                f"{game.name} returned the same environment twice; give a function that makes a new one in each call"
            )
        self._seeds, self._moves = [UNKNOWN] * num_envs, [list[int]() for _ in range(num_envs)]
        self._observations = Codec("observation", game.single_observation_space)

    @property
    def player(self) -> Tensor:
        return torch.tensor([self._player(env) for env in self._envs], dtype=torch.int64, device=self._device)

    def begin(self, row_R: Tensor, seed_R: Tensor) -> None:
        for row, seed in zip(row_R.tolist(), seed_R.tolist(), strict=True):
            self._seeds[row], self._moves[row] = seed, []
            self._call(row, lambda env, seed=seed: env.reset(seed=seed))

    def observe(self, row_R: Tensor, player_R: Tensor) -> Tree:
        rows = row_R.tolist()
        pairs = list(zip(rows, player_R.tolist(), strict=True))
        observation = self._observations.stack([self._observed(*pair) for pair in pairs], rows)
        must_act = np.array([self._player(self._envs[row]) == x and not any(self._ends(row)) for row, x in pairs])
        game = self._game
        check_masks(observation, game.single_observation_space, game.single_action_space, must_act, rows)
        return to_device(observation, self._device)

    def play(self, row_R: Tensor, action_R: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        rewards, ends = [], []
        for row, action in zip(row_R.tolist(), action_R.tolist(), strict=True):
            self._call(row, lambda env, action=action: env.step(action))
            self._moves[row].append(action)
            rewards.append([self._envs[row].rewards[player] for player in self._game.players])
            ends.append(self._ends(row))
        reward_R2 = torch.from_numpy(column("reward", rewards, _FLOAT, (2,), row_R.tolist())).to(self._device)
        ends_R2 = torch.tensor(ends, dtype=torch.bool, device=self._device)
        return reward_R2, ends_R2[:, 0], ends_R2[:, 1]

    def state_dict(self) -> dict[str, Any]:
        moves = [torch.tensor(of_row, dtype=torch.int64, device="cpu") for of_row in self._moves]
        seed_N = torch.tensor(self._seeds, dtype=torch.int64, device="cpu")
        return {"seeds": seed_N, "moves": moves, "observation": self._current()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        seeds = restored(state, "seeds", torch.tensor(self._seeds, dtype=torch.int64, device="cpu")).tolist()
        self._seeds, self._moves = seeds, [moves.tolist() for moves in state["moves"]]
        for row, moves in enumerate(self._moves):
            if seeds[row] != UNKNOWN:
                self._call(row, lambda env, row=row: env.reset(seed=seeds[row]))
                for move in moves:
                    self._call(row, lambda env, move=move: env.step(move))
        for (path, saved), (_, repeated) in zip(
            leaves(state["observation"], "observation"), leaves(self._current()), strict=True
        ):
            if not torch.equal(saved.to(repeated.device), repeated):
                raise EnvironmentContractError(
                    f"{self._game.name}: the seed and the moves of a game did not reproduce {path}; all that is random "
                    "in the environment must depend on the seed of reset()"
                )

    def close(self) -> None:
        while self._envs:
            self._envs.pop().close()

    def _player(self, env: Any) -> int:
        return self._game.players.index(env.agent_selection)

    def _current(self) -> Tree:
        """Return the observations (N, ...) of the players to move; None before the games begin."""
        if UNKNOWN in self._seeds:
            return None
        player_N = self.player
        return self.observe(torch.arange(len(player_N), device=self._device), player_N)

    def _observed(self, row: int, player: int) -> Any:
        env, name = self._envs[row], self._game.players[player]
        observation = self._call(row, lambda env: env.observe(name))
        if self._game.added_mask is None:
            return observation
        who = f"{self._game.name}: info.{ACTION_MASK} of {name}"
        return folded(observation, as_mask(self._game.added_mask, env.infos[name].get(ACTION_MASK), who))

    def _ends(self, row: int) -> tuple[bool, bool]:
        """Return whether a player is terminated, and whether one is truncated."""
        env, place = self._envs[row], f"episode seed {self._seeds[row]}, move {len(self._moves[row])}"
        names = [f"{row} (player {name!r}, {place})" for name in env.terminations]
        ended = ended_flags(tuple(env.terminations.values()), tuple(env.truncations.values()), names)
        return (False, False) if ended is None else (bool(ended[0].any()), bool(ended[1].any()))

    def _call(self, row: int, method: Callable[[Any], Any]) -> Any:
        try:
            return method(self._envs[row])
        except Exception as error:  # re-raised with a note
            moves = len(self._moves[row])
            error.add_note(f"in game {row} of {self._game.name}, episode seed {self._seeds[row]}, move {moves}")
            raise


def _players(environment: Any, name: str) -> list[Any]:
    """Return the names of the two players. Raises TypeError or ValueError for another environment."""
    if not all(hasattr(environment, attribute) for attribute in ("possible_agents", "observe", "agent_iter")):
        kind = "a parallel environment" if hasattr(environment, "possible_agents") else f"{environment!r:.80}"
        raise TypeError(
            f"{name} returned {kind}, and must return an AEC environment of PettingZoo, in which players take turns; "
            "use rein.PettingZooEnvironment for parallel environments"
        )
    if environment.metadata.get("is_parallelizable"):
        raise TypeError(
            f"{name} returned an environment in which agents act at the same time (is_parallelizable); use "
            "rein.PettingZooEnvironment with a function that returns the parallel environment"
        )
    players = list(environment.possible_agents)
    if len(players) != 2:
        raise ValueError(f"{name}: self-play needs a game of 2 players, got {len(players)}: {players}")
    return players
