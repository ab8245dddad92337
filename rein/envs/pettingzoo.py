"""Adapters for PettingZoo: parallel environments as W worlds of A agents, and turn-based games for self-play.

Shapes: W worlds, A agents of a world, N = W * A rows or N games, R games of them.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from rein.envs.base.contract import checked_count, restored
from rein.envs.base.games import Games
from rein.envs.base.seeding import UNKNOWN
from rein.envs.gymnasium.adapter import as_json, name_of
from rein.envs.host.block import Setup, WorldAgent, check_row_count
from rein.envs.host.episode_inputs import Options
from rein.envs.host.host_environment import SteppedSeparately
from rein.envs.host.pool import workers_of
from rein.envs.host.results import RESET, STEP, check_has_mask, check_parts, ended_flags, missing_masks, missing_values
from rein.errors import EnvironmentContractError
from rein.ops.trees import leaves, to_device
from rein.spaces import ACTION_MASK, entry
from rein.spaces.common import append_agent_id, check_sizes, common_space, masks_of_sizes, padded, with_agent_id
from rein.spaces.conversion import Codec, column
from rein.spaces.masks import as_mask, check_masks, folded, folded_space, mask_space
from rein.types import Group, Tree

_FLOAT = np.dtype(np.float32)


class PettingZooEnvironment(SteppedSeparately):
    """W worlds of a parallel environment of PettingZoo, with a row for each of its `possible_agents`.

    All rows have one observation space and one action space. If those of the agents differ, vectors are padded with
    zeros, and `Discrete` spaces get the largest number of actions. The observation then has the entry `action_mask`,
    which excludes the actions that an agent does not have. The agents of a group have equal names except for their
    numbers, as `adversary_0` and `adversary_1`.

    Example::

        from mpe2 import simple_spread_v3

        env = rein.PettingZooEnvironment(simple_spread_v3.parallel_env, worlds=8, seed=0)

    Args:
        make_parallel_env: function that returns a parallel environment.
        worlds: number of worlds W.
        seed: random seed of all worlds. By default it is drawn at the first reset.
        agent_id: append a one-hot vector of the agent's number to observations, which must be vectors.
        info: entries of the infos of agents to store, as in `GymnasiumEnvironment`.
        action_mask: add `info["action_mask"]` of each agent to its observation, as in `GymnasiumEnvironment`. Masks in
            observations need no option.
        replayable: whether a seed and actions reproduce an episode. False, for instance, if it depends on a clock.
        max_replay_steps: steps of an open episode that a resumed run can repeat.
        workers: number of processes or threads that step worlds at the same time, for environments that take
            milliseconds per step. It and the next options are those of `GymnasiumEnvironment`.
        **make_kwargs: keyword arguments of the function.

    Raises:
        TypeError: if the function does not return a parallel environment, or if the spaces of agents differ in another
            way than in their size.
        ValueError: if only continuous actions would have masks, if worlds have different agents, or if the function
            returns the same environment twice.
        WorkerError: if a worker fails while it makes its worlds.
    """

    def __init__(
        self,
        make_parallel_env: Callable[..., Any],
        worlds: int = 1,
        seed: int | None = None,
        *,
        agent_id: bool = False,
        info: Mapping[str, Any] | None = None,
        action_mask: bool | None = None,
        replayable: bool = True,
        max_replay_steps: int = 1_000_000,
        workers: int | None = None,
        mode: Literal["processes", "threads"] | None = None,
        timeout: float | None = None,
        on_failure: Literal["raise", "restart"] | None = None,
        max_restarts: int | None = None,
        **make_kwargs: Any,
    ) -> None:
        if not callable(make_parallel_env):
            raise TypeError(
                f"PettingZooEnvironment({make_parallel_env!r:.80}): give a function that returns a parallel "
                "environment, such as simple_spread_v3.parallel_env, and worlds= for several worlds"
            )
        self.worlds, self.agent_id = checked_count(f"worlds={worlds!r}", worlds), agent_id
        name = name_of(make_parallel_env)
        options: Any = {"mode": mode, "timeout": timeout, "on_failure": on_failure, "max_restarts": max_restarts}
        of_workers = workers_of(workers, make_kwargs, **options)
        make = functools.partial(_World, make_parallel_env, make_kwargs, name, bool(action_mask), agent_id)
        setup = Setup(
            name=name,
            make=functools.partial(_make_all, make),
            worlds=True,
            info=missing_values(info),
            action_mask=action_mask,
            replayable=replayable,
            max_replay_steps=checked_count(f"max_replay_steps={max_replay_steps!r}", max_replay_steps),
            config={
                "agent_id": agent_id,
                "make_kwargs": {key: as_json(value) for key, value in make_kwargs.items()},
            },
        )
        super().__init__(setup, range(self.worlds), seed, of_workers)
        action_spaces = [agent.action_space for agent in self._of_world]
        sizes: list[Any] = [space.n for space in action_spaces if isinstance(space, spaces.Discrete)]
        start = getattr(self.single_action_space, "start", 0)
        self._ends_N = np.array(sizes * self.worlds, np.int64) + int(start)

    @property
    def groups(self) -> dict[str, Group]:
        """Groups of agents by name, with their original spaces, or with padded vectors if `agent_id` is set.

        A group whose agents have different spaces has the spaces of a row.
        """
        members: dict[str, list[int]] = {}
        for number, agent in enumerate(self._of_world):
            members.setdefault(re.sub(r"[_-]?\d+$", "", str(agent.name)) or "agent", []).append(number)
        first_W1 = torch.arange(0, self.num_envs, len(self._of_world), device="cpu")[:, None]
        groups = {}
        for name, numbers in members.items():
            row_R = (first_W1 + torch.tensor(numbers, dtype=torch.int64, device="cpu")).flatten()
            first, *others = (self._of_world[number][1:] for number in numbers)
            alike = all(other == first for other in others)
            groups[name] = Group(
                row_R, *(first if alike else (self.single_observation_space, self.single_action_space))
            )
        return groups

    @property
    def _of_world(self) -> Sequence[WorldAgent]:
        return self._transport.about.agents or ()

    def _check_action(self, action: Tree, rows: Sequence[int]) -> None:
        """Check the action also for agents that have fewer actions than others, and have not left."""
        super()._check_action(action, rows)
        if not len(self._ends_N):
            return
        check_row_count(action, len(rows))
        chosen = [*rows]
        wrong_R = (action.numpy(force=True) >= self._ends_N[chosen]) & self._transport.alive[chosen]
        for place in np.flatnonzero(wrong_R).tolist():
            row = chosen[place]
            agent = self._of_world[row % len(self._of_world)]
            space: Any = agent.action_space
            raise EnvironmentContractError(
                f"action, row {row}: the agent {agent.name!r} of {self._setup.name} has the actions {space.start} to "
                f"{space.start + space.n - 1}, got {action[place].tolist()}; choose an action that the entry "
                "'action_mask' of the observation allows"
            )


class _World:
    """A parallel environment whose agents are rows, see `Block`."""

    def __init__(
        self, make: Callable[..., Any], make_kwargs: Mapping[str, Any], name: str, action_mask: bool, agent_id: bool
    ) -> None:
        self.unwrapped, self._name, self._agent_id = _made(make, make_kwargs, name), name, agent_id
        self.metadata = getattr(self.unwrapped, "metadata", {})
        self.render_mode = getattr(self.unwrapped, "render_mode", None)
        try:
            self._set_spaces(action_mask)
        except BaseException:
            self.close()
            raise

    def _set_spaces(self, action_mask: bool) -> None:
        name = self._name
        names = self._names = list(self.unwrapped.possible_agents)
        observed = {agent: self.unwrapped.observation_space(agent) for agent in names}
        taken = {agent: self.unwrapped.action_space(agent) for agent in names}
        self._masks: dict[Any, spaces.Space[Any]] = {}  # by agent, of the masks to add
        for agent in names if action_mask else ():
            if mask := missing_masks(name, SimpleNamespace(observation_space=observed[agent]), taken[agent]):
                self._masks[agent] = mask
                observed[agent] = folded_space(observed[agent], mask)
        self._unpadded_spaces, self._action_spaces = [*observed.values()], [*taken.values()]
        self._observation_spaces = self._unpadded_spaces
        self.action_space = common_space(name, "action", self._action_spaces)
        if self._agent_id:
            self._observation_spaces = with_agent_id(name, self._observation_spaces)
        self.observation_space = common_space(name, "observation", self._observation_spaces)
        self._size_masks = None  # of the actions (A,) that each agent has, if the observation needs such masks
        if entry(self.observation_space, ACTION_MASK) is None:
            self._size_masks = masks_of_sizes(self.action_space, self._action_spaces)
        if self._size_masks is not None:
            mask_space = spaces.MultiBinary(len(self._size_masks[0]))
            self.observation_space = folded_space(self.observation_space, mask_space)
        self._is_padded = [space != self.observation_space for space in self._unpadded_spaces]
        self.agents = [WorldAgent(*of) for of in zip(names, self._observation_spaces, self._action_spaces, strict=True)]
        self._here: Sequence[int] = ()  # agents that took part in the last step
        self._flags = self._no_flags()  # terminated and truncated of the last step, which `Block` checks
        self._rows: list[Any] = [None] * len(names)  # last observation of each agent

    def reset(self, *, seed: int, options: Options | None = None) -> tuple[list[Any], list[Any]]:
        """Begin an episode. Returns observations and infos of all agents."""
        keywords = {} if options is None else {"options": options}
        observations, infos = self._parts("reset", self.unwrapped.reset(seed=seed, **keywords), RESET)
        for name in self._masks.keys() & observations.keys():
            check_has_mask(self._name, infos.get(name, {}))
        if absent := [name for name in self._names if name not in observations]:
            raise EnvironmentContractError(
                f"{self._name}: reset returned no observation of {', '.join(map(repr, absent))}; all possible_agents "
                "must take part in an episode from its first step"
            )
        self._here, self._flags = range(len(self._names)), self._no_flags()
        self._rows = [self._row(agent, observations[name], infos) for agent, name in enumerate(self._names)]
        return [*self._rows], [infos.get(name, {}) for name in self._names]

    def step(self, actions: Sequence[Any]) -> tuple[list[Any], ...]:
        """Step with the actions of all agents, of which those that have left have no effect."""
        here = [agent for agent in self._here if not any(flags[agent] for flags in self._flags)]
        taken = {self._names[agent]: self._of_agent(agent, actions[agent]) for agent in here}
        observations, *parts, infos = self._parts("step", self.unwrapped.step(taken), STEP)
        results = [[0.0] * len(self._names), *self._no_flags()]
        self._flags = results[1:]
        self._here = here
        for agent in here:
            name = self._names[agent]
            for what, part in zip(STEP, (observations, *parts), strict=False):
                if name not in part:
                    raise EnvironmentContractError(
                        f"{self._name}: step returned no {what} of {name!r}, which has neither terminated nor been "
                        "truncated"
                    )
            for result, part in zip(results, parts, strict=True):
                result[agent] = part[name]
            self._rows[agent] = self._row(agent, observations[name], infos)
        return [*self._rows], *results, [infos.get(name, {}) for name in self._names]

    def render(self) -> Any:
        """Return an RGB frame, or None if there is none."""
        return self.unwrapped.render()

    def close(self) -> None:
        """Close the parallel environment."""
        self.unwrapped.close()

    def _no_flags(self) -> list[list[Any]]:
        return [[False] * len(self._names) for _ in range(2)]

    def _parts(self, method: str, result: Any, parts: tuple[str, ...]) -> Any:
        check_parts(self._name, method, result, parts)
        for part, value in zip(parts, result, strict=True):
            if not isinstance(value, Mapping):
                raise EnvironmentContractError(
                    f"{self._name}: {method} must return {part} as a dictionary by agent, got {value!r:.200}"
                )
        return result

    def _row(self, agent: int, observation: Any, infos: Mapping[Any, Any]) -> Any:
        """Return a copy of the observation of an agent in the space of a row.

        Raises EnvironmentContractError for a vector of another size than the space of the agent.
        """
        name = self._names[agent]
        if name in self._masks:
            who = f"{self._name}: info.{ACTION_MASK} of {name}"
            mask = as_mask(self._masks[name], infos.get(name, {}).get(ACTION_MASK), who)
            observation = folded(observation, mask)
        if not self._is_padded[agent]:  # `Block` checks the observation
            return copy.deepcopy(observation)
        check_sizes(f"{self._name}: observation of {name!r}", observation, self._unpadded_spaces[agent])
        if self._agent_id:
            observation = append_agent_id(observation, self._observation_spaces[agent], agent, len(self._names))
        if self._size_masks is not None:
            observation = folded(observation, self._size_masks[agent])
        return padded(observation, self.observation_space)

    def _of_agent(self, agent: int, action: Any) -> Any:
        """Return the action of a row as an action of its agent."""
        space = self._action_spaces[agent]
        return action[: space.shape[0]] if isinstance(space, spaces.Box) and len(space.shape) == 1 else action


def _make_all(make: Callable[[], _World], numbers: range) -> list[_World]:
    made: list[_World] = []
    with contextlib.ExitStack() as after_an_error:
        for _ in numbers:
            made.append(make())
            after_an_error.callback(made[-1].close)
        after_an_error.pop_all()
    return made


def _made(make: Callable[..., Any], make_kwargs: Mapping[str, Any], name: str) -> Any:
    made = make(**make_kwargs)
    if not all(hasattr(made, attribute) for attribute in ("possible_agents", "observation_space", "step", "reset")):
        raise TypeError(f"{name} returned {made!r:.80}, and must return a parallel environment of PettingZoo")
    if hasattr(made, "agent_iter"):
        raise TypeError(
            f"{name} returned an environment of PettingZoo in which agents take turns; give a function that returns a "
            "parallel environment, such as parallel_env"
        )
    return made


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
