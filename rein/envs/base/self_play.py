"""Turn-based games of two players, and the environment in which an agent learns to play them.

Shapes: N games, P starts of games, R games in which the opponent moves, S a state, A actions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from gymnasium import spaces
from torch import Tensor

from rein.envs.base.contract import check_action, checked_num_envs, restored
from rein.envs.base.seeding import EpisodeSeeds
from rein.envs.base.spaces import representation
from rein.errors import EnvironmentContractError
from rein.networks.reserved import mask_of
from rein.ops.random import integers, uniform
from rein.ops.trees import checked_device
from rein.types import TimeStep, Tree

_SEAT, _OPPONENT, _MOVES = 0, 1, 2  # counters of the random numbers of an episode


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


class SelfPlay:
    """N games against opponents who move inside of the step. Each row is a game of the learning agent.

    The agent moves first or second with equal probability. Its opponent is one of `opponents`, or moves at random, all
    with equal probability. Both are drawn for each episode. The reward is that of the game: usually 1 for a win, 0 for
    a draw and -1 for a loss.

    Args:
        game: game of two players.
        num_envs: number of games N.
        opponents: pool of opponents. By default all opponents move at random.
        seed: random seed of all games. By default it is drawn at the first reset.
        device: device of observations and actions.
    """

    @torch.inference_mode(False)
    def __init__(
        self,
        game: TurnBasedGame,
        num_envs: int = 16,
        *,
        opponents: Opponents | None = None,
        seed: int | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.game, self.opponents = game, opponents
        self.num_envs = checked_num_envs(num_envs, "SelfPlay")
        self.device = checked_device(device)
        self.single_observation_space: Any = game.single_observation_space
        self.single_action_space: Any = game.single_action_space
        self._seeds = EpisodeSeeds(self.num_envs, seed, self.device)
        self._opponent_N = torch.full((num_envs,), -1, dtype=torch.int64, device=self.device)  # -1 moves at random
        self._moves_N = torch.zeros_like(self._opponent_N)  # of the opponent in this episode
        self._carry_NC: Tensor | None = None  # memory of recurrent opponents
        self._state = game.initial_state(torch.zeros_like(self._opponent_N))

    @property
    def seed(self) -> int | None:
        """Random seed of all games; None until given or drawn at the first reset."""
        return self._seeds.seed

    @property
    def replayable(self) -> bool:
        """Whether the seed and the actions of an episode reproduce it: only if opponents move at random."""
        return self.opponents is None

    @property
    def episode_seeds(self) -> Tensor:
        """(N,) int64: seeds of the current episodes; -1 before the first reset."""
        return self._seeds.current

    @property
    def seats(self) -> Tensor:
        """(N,) int64: 0 in episodes in which the agent moves first, and 1 in the others."""
        return integers(self.episode_seeds, _SEAT, 2)

    @property
    def config(self) -> dict[str, Any]:
        """Constructor options, as JSON values."""
        return {"game": type(self.game).__name__, "num_envs": self.num_envs, "seed": self.seed}

    def reset(self, seed: int | None = None) -> Tree:
        """Begin the next episode of every game, from episode 0 if `seed` is given. Returns the observation."""
        if seed is not None:
            self._seeds.restart(seed)
        return self._begin_all(self._seeds.advance())

    def reset_to(self, episode_seeds: Tensor) -> Tree:
        """Begin the episodes with these seeds (N,), for a replay. Later episodes are seeded as usual."""
        return self._begin_all(self._seeds.override(episode_seeds))

    def apply_action(self, action: Tensor) -> TimeStep:
        """Play the moves (N,) of the agent and those of its opponents.

        Raises RuntimeError before the first reset, and EnvironmentContractError for a move that is not valid.
        """
        if not self._seeds.started:
            raise RuntimeError("SelfPlay.apply_action: call reset() first")
        check_action(action, self.num_envs, self.single_action_space)
        _check_moves(self.game.observe(self._state), action)
        self._state, reward_N, over_N = self.game.play(self._state, action)
        reward_N, over_N = self._respond(~over_N, reward_N.clone(), over_N.clone())
        final_observation = observation = self.game.observe(self._state)
        if bool(over_N.any()):
            self._begin(over_N, self._seeds.advance(over_N))
            observation = self.game.observe(self._state)
        ends = over_N, torch.zeros_like(over_N)
        return TimeStep(observation, reward_N, *ends, final_observation)

    def reseed(self, seed: int) -> None:
        """Set the random seed. Raises RuntimeError after the first reset."""
        self._seeds.reseed(seed)

    def close(self) -> None:
        """Do nothing: the environment holds no resources."""

    def state_dict(self) -> dict[str, Any]:
        """Return the games, and the state of the opponents."""
        state = {"seeds": self._seeds.state_dict(), "state": self._state, "opponent": self._opponent_N}
        opponents = {} if self.opponents is None else {"opponents": self.opponents.state_dict()}
        return {**state, "moves": self._moves_N, "carry": self._carry_NC, **opponents}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of `state_dict`. Raises ValueError for another number of games."""
        games, opponent_N, moves_N = (
            restored(state, name, like)
            for name, like in (("state", self._state), ("opponent", self._opponent_N), ("moves", self._moves_N))
        )
        self._seeds.load_state_dict(state["seeds"])
        if self.opponents is not None:
            self.opponents.load_state_dict(state["opponents"])
        self._state, self._opponent_N, self._moves_N = games, opponent_N, moves_N
        self._carry_NC = None if state["carry"] is None else state["carry"].to(self.device, copy=True)

    def __repr__(self) -> str:
        return representation(self, type(self.game).__name__, f"num_envs={self.num_envs}")

    def _begin_all(self, seed_N: Tensor) -> Tree:
        self._begin(torch.ones_like(seed_N, dtype=torch.bool), seed_N)
        return self.game.observe(self._state)

    def _begin(self, mask_N: Tensor, seed_N: Tensor) -> None:
        """Begin episodes where the mask is True, with the first move of opponents who move first."""
        row_R = mask_N.nonzero().flatten()
        self._state, self._moves_N = self._state.clone(), self._moves_N.masked_fill(mask_N, 0)
        self._state[row_R] = self.game.initial_state(seed_N[row_R])
        count = 0 if self.opponents is None else len(self.opponents)
        drawn_N = integers(seed_N, _OPPONENT, count + 1) - 1
        self._opponent_N = torch.where(mask_N, drawn_N, self._opponent_N)
        if self._carry_NC is not None:
            self._carry_NC = self._carry_NC.masked_fill(mask_N[:, None], 0.0)
        zero_N = torch.zeros_like(mask_N, dtype=torch.float32)
        self._respond(mask_N & (self.seats == 1), zero_N, torch.zeros_like(mask_N))

    def _respond(self, mask_N: Tensor, reward_N: Tensor, over_N: Tensor) -> tuple[Tensor, Tensor]:
        """Play the moves of opponents where the mask is True. Update and return rewards and ends."""
        for index in self._opponent_N[mask_N].unique().tolist():
            row_R = (mask_N & (self._opponent_N == index)).nonzero().flatten()
            observation = self.game.observe(self._state[row_R])
            if index < 0 or self.opponents is None:
                action_R = self._random(row_R, observation)
            else:
                action_R = self._select(self.opponents, index, observation, row_R)
            moved, reward_R, over_R = self.game.play(self._state[row_R], action_R)
            self._state = self._state.index_copy(0, row_R, moved)
            reward_N[row_R], over_N[row_R] = -reward_R, over_R
        self._moves_N = self._moves_N + mask_N
        return reward_N, over_N

    def _select(self, opponents: Opponents, index: int, observation: Tree, row_R: Tensor) -> Tensor:
        """Return the actions (R,) of one opponent, and keep its carry."""
        carry_RC = None if self._carry_NC is None else self._carry_NC[row_R]
        action_R, carry_RC = opponents.select_action(index, observation, carry_RC)
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


def _check_moves(observation: Tree, action: Tensor) -> None:
    """Raise EnvironmentContractError if a move (N,) is not valid."""
    mask_NA: Any = mask_of(observation)
    valid_N = mask_NA.gather(1, action[:, None]).squeeze(1)
    if not bool(valid_N.all()):
        row = int((~valid_N).nonzero()[0])
        raise EnvironmentContractError(
            f"action, environment {row}: expected a move that action_mask allows, got {int(action[row])}"
        )
