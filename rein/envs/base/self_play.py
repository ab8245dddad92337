"""Environment in which an agent learns to play a turn-based game of two players.

Shapes: N games, R games in which one player moves, A actions, C numbers of a carry.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from rein.envs.base.contract import (
    CLOSED,
    check_action,
    check_begun,
    checked_num_envs,
    ends_episodes,
    representation,
    restored,
)
from rein.envs.base.games import Game
from rein.envs.base.seeding import EpisodeSeeds, ReplayableEnvironment
from rein.envs.pettingzoo import PettingZooGame
from rein.errors import EnvironmentContractError
from rein.ops.random import integers, uniform
from rein.ops.trees import checked_device, map_tree
from rein.spaces import mask_of
from rein.types import TimeStep, Tree

_SEAT, _OPPONENT, _MOVES = 0, 1, 2  # counters of the random numbers of an episode


class Opponents(Protocol):
    """Policies of the opponents in `SelfPlay`, such as `rein.OpponentPool`."""

    def __len__(self) -> int:
        """Number of policies; 0 for opponents that move at random."""
        ...

    def select_action(self, index: int, observation: Tree, carry: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the actions (R,) of one policy, and its next carry (R, C); None if it is not recurrent.

        `carry` (R, C) is its memory of each game, zeros at the beginning; None before any policy has returned one.
        """
        ...

    def state_dict(self) -> dict[str, Any]:
        """See `Stateful`."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Stateful`."""
        ...


class _Result(NamedTuple):
    """Result of the moves in a step, updated in place."""

    reward_N: Tensor  # of the agent
    terminated_N: Tensor
    truncated_N: Tensor

    @property
    def over_N(self) -> Tensor:
        return self.terminated_N | self.truncated_N


class SelfPlay(ReplayableEnvironment):
    """N games against opponents who move inside of the step. Each row is a game of the learning agent.

    The agent is the first or the second player with equal probability. Its opponent is one of `opponents`, or moves at
    random, all with equal probability. Both are drawn for each episode. The reward is that of the agent since its last
    move: usually 1 for a win, 0 for a draw and -1 for a loss. If an opponent ends a game before the first move of the
    agent, the next episode begins at once.

    Args:
        game: game of two players: a `TurnBasedGame`, a `PettingZooGame`, or a function that returns an AEC environment
            of PettingZoo.
        num_envs: number of games N.
        opponents: pool of opponents. By default all opponents move at random.
        seed: random seed of all games. By default it is drawn at the first reset.
        device: device of observations and actions.
    """

    @torch.inference_mode(False)
    def __init__(
        self,
        game: Game | Callable[[], Any],
        num_envs: int = 16,
        *,
        opponents: Opponents | None = None,
        seed: int | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.game: Game = game if hasattr(game, "games") else PettingZooGame(game)  # type: ignore[assignment, arg-type]
        self.opponents = opponents
        self.num_envs = checked_num_envs(num_envs, "SelfPlay")
        self.device = checked_device(device)
        self.single_observation_space: Any = self.game.single_observation_space
        self.single_action_space: Any = self.game.single_action_space
        self._seeds = EpisodeSeeds(self.num_envs, seed, self.device)
        self._row_N = torch.arange(self.num_envs, device=self.device)
        self._opponent_N = torch.full_like(self._row_N, -1)  # -1 moves at random
        self._seat_N = torch.zeros_like(self._row_N)
        self._moves_N = torch.zeros_like(self._row_N)  # of the opponent in this episode
        self._carry_NC: Tensor | None = None  # memory of recurrent opponents
        self._games = self.game.games(self.num_envs, self.device)
        self._observation: Tree = None  # the current observation; None before the first reset

    @property
    def replayable(self) -> bool:
        """Whether the seed and the actions of an episode reproduce it: only if opponents move at random."""
        return self.opponents is None

    @property
    def seats(self) -> Tensor:
        """(N,) int64: 0 in episodes in which the agent is the first player, and 1 in the others."""
        return self._seat_N

    @property
    def config(self) -> dict[str, Any]:
        """Constructor options, as JSON values."""
        return {"game": self.game.name, "num_envs": self.num_envs, "seed": self.seed}

    def apply_action(self, action: Tensor) -> TimeStep:
        """Play the moves (N,) of the agent and those of its opponents.

        Raises RuntimeError before the first reset, and EnvironmentContractError for a move that is not valid.
        """
        check_begun("SelfPlay", "apply_action", self._observation is not None, self._ended)
        check_action(action, self.num_envs, self.single_action_space)
        _check_moves(self._row_N, self._observation, action)
        return self._step(action)

    @ends_episodes
    def _step(self, action: Tensor) -> TimeStep:
        result = self._no_result()
        self._play(self._row_N, action, result)
        self._respond(self._row_N >= 0, result)
        over_N = result.over_N
        final_observation = self._observation = self._games.observe(self._row_N, self._seat_N)
        if bool(over_N.any()):
            self._begin_games(over_N, self._seeds.advance(over_N))
            row_R = over_N.nonzero().flatten()
            first = self._games.observe(row_R, self._seat_N[row_R])
            self._observation = map_tree(lambda x, new: x.index_copy(0, row_R, new), final_observation, first)
        return TimeStep(self._observation, *result, final_observation)

    def close(self) -> None:
        """Close the environments of PettingZoo. A second call does nothing."""
        self._observation, self._ended = None, CLOSED
        self._games.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the games, and the state of the opponents."""
        state = {"seeds": self._seeds.state_dict(), "games": self._games.state_dict(), "opponent": self._opponent_N}
        opponents = {} if self.opponents is None else {"opponents": self.opponents.state_dict()}
        return {**state, "moves": self._moves_N, "carry": self._carry_NC, **opponents}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of `state_dict`. The moves of open games of PettingZoo are repeated.

        Raises ValueError for another number of games, and EnvironmentContractError if a repeated game differs.
        """
        opponent_N, moves_N = (restored(state, name, self._row_N) for name in ("opponent", "moves"))
        self._seeds.load_state_dict(state["seeds"])
        self._games.load_state_dict(state["games"])
        if self.opponents is not None:
            self.opponents.load_state_dict(state["opponents"])
        self._seat_N, self._opponent_N, self._moves_N = integers(self.episode_seeds, _SEAT, 2), opponent_N, moves_N
        self._carry_NC = None if state["carry"] is None else state["carry"].to(self.device, copy=True)
        self._observation = self._games.observe(self._row_N, self._seat_N) if self._seeds.started else None
        self._ended = None

    def __repr__(self) -> str:
        return representation(self, self.game.name, f"num_envs={self.num_envs}")

    def _no_result(self) -> _Result:
        over_N = torch.zeros_like(self._row_N, dtype=torch.bool)
        return _Result(torch.zeros_like(self._row_N, dtype=torch.float32), over_N, over_N.clone())

    @ends_episodes
    def _begin(self, seed_N: Tensor, /) -> Tree:
        self._begin_games(self._row_N >= 0, seed_N)
        self._observation, self._ended = self._games.observe(self._row_N, self._seat_N), None
        return self._observation

    def _begin_games(self, mask_N: Tensor, seed_N: Tensor) -> None:
        """Begin episodes where the mask is True, with the first moves of opponents who move first."""
        row_R = mask_N.nonzero().flatten()
        self._games.begin(row_R, seed_N[row_R])
        self._seat_N = integers(self.episode_seeds, _SEAT, 2)
        count = 0 if self.opponents is None else len(self.opponents)
        drawn_N = integers(seed_N, _OPPONENT, count + 1) - 1
        self._opponent_N = torch.where(mask_N, drawn_N, self._opponent_N)
        self._moves_N = self._moves_N.masked_fill(mask_N, 0)
        if self._carry_NC is not None:
            self._carry_NC = self._carry_NC.masked_fill(mask_N[:, None], 0.0)
        result = self._no_result()
        self._respond(mask_N, result)
        if bool(result.over_N.any()):
            self._begin_games(result.over_N, self._seeds.advance(result.over_N))

    def _respond(self, mask_N: Tensor, result: _Result) -> None:
        """Play the moves of opponents where the mask is True, until the agent is to move or the game is over."""
        while bool((turn_N := mask_N & ~result.over_N & (self._games.player != self._seat_N)).any()):
            for index in self._opponent_N[turn_N].unique().tolist():
                row_R = (turn_N & (self._opponent_N == index)).nonzero().flatten()
                observation = self._games.observe(row_R, 1 - self._seat_N[row_R])
                action_R = self._select(index, row_R, observation)
                _check_moves(row_R, observation, action_R)
                self._play(row_R, action_R, result)
            self._moves_N = self._moves_N + turn_N

    def _play(self, row_R: Tensor, action_R: Tensor, result: _Result) -> None:
        """Play valid moves, and add their rewards and ends to the result."""
        reward_R2, terminated_R, truncated_R = self._games.play(row_R, action_R)
        result.reward_N[row_R] += reward_R2.gather(1, self._seat_N[row_R, None]).squeeze(1)
        result.terminated_N[row_R], result.truncated_N[row_R] = terminated_R, truncated_R

    def _select(self, index: int, row_R: Tensor, observation: Tree) -> Tensor:
        """Return the actions (R,) of one opponent, and keep its carry."""
        if index < 0 or self.opponents is None:
            return self._random(row_R, observation)
        carry_RC = None if self._carry_NC is None else self._carry_NC[row_R]
        action_R, carry_RC = self.opponents.select_action(index, observation, carry_RC)
        if carry_RC is not None:
            if self._carry_NC is None:
                self._carry_NC = carry_RC.new_zeros(self.num_envs, carry_RC.shape[1])
            self._carry_NC = self._carry_NC.index_copy(0, row_R, carry_RC)
        return action_R

    def _random(self, row_R: Tensor, observation: Tree) -> Tensor:
        """Return random valid moves (R,), which depend on the seed of the episode and the number of the move."""
        mask_RA: Any = mask_of(observation)
        action_A = torch.arange(mask_RA.shape[1], device=self.device)
        counter_RA = _MOVES + self._moves_N[row_R, None] * len(action_A) + action_A
        number_RA = uniform(self.episode_seeds[row_R, None], counter_RA)
        return number_RA.masked_fill(~mask_RA, -1.0).argmax(1)


def _check_moves(row_R: Tensor, observation: Tree, action_R: Tensor) -> None:
    """Raise EnvironmentContractError if a move (R,) is not valid."""
    mask_RA: Any = mask_of(observation)
    valid_R = mask_RA.gather(1, action_R[:, None]).squeeze(1)
    if not bool(valid_R.all()):
        wrong = (~valid_R).nonzero()[0]
        row, action = int(row_R[wrong]), int(action_R[wrong])
        raise EnvironmentContractError(
            f"action, environment {row}: expected a move that action_mask allows, got {action}"
        )
