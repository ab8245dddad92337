"""Simulators that one process or thread steps, one after the other.

A simulator has the methods of a `gymnasium.Env`. It has one row, or it is a world with a row for each agent. A world
takes a list of actions, and returns lists of observations, rewards, flags and infos. An agent that has left keeps its
last observation, and has reward 0 and no flags.

Shapes: W simulators, A agents of each (1 without worlds), N = W * A rows, R rows of some simulators, T steps.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import attrs
import numpy as np
import torch
from gymnasium import spaces

from rein.envs.base.contract import ends_episodes, restored
from rein.envs.base.seeding import HostEpisodeSeeds
from rein.envs.host.episode_inputs import ActionHistory, ResetOptions, as_keywords, put_actions, zeros
from rein.envs.host.results import RESET, STEP, check_parts, ended_flags, wanted_infos
from rein.errors import EnvironmentContractError
from rein.ops.trees import leaves, map_tree
from rein.spaces import ACTION_MASK, entry
from rein.spaces.conversion import Codec, column
from rein.spaces.masks import check_masks
from rein.types import TimeStep, Tree

_FLOAT = np.dtype(np.float32)


def no_simulators(numbers: range) -> list[Any]:
    """Return no simulators, for an environment whose transport makes them."""
    return []


@attrs.frozen(kw_only=True)
class Setup:
    """How the simulators of an environment are made, and what their rows have in common.

    Args:
        name: name of the environment in messages.
        make: function that returns the simulators with the numbers of a range.
        worlds: whether a simulator is a world, with a row for each agent.
        info: entries of the infos to store, with their default values.
        action_mask: whether masks of infos are in the observation. None warns of masks that are not.
        replayable: whether a seed and actions reproduce an episode.
        max_replay_steps: steps of an open episode that a resumed run can repeat.
        config: further constructor options, as JSON values.
    """

    name: str
    make: Callable[[range], list[Any]] = no_simulators
    worlds: bool = False
    info: Mapping[str, np.ndarray[Any, Any]] = attrs.field(factory=dict)
    action_mask: bool | None = None
    replayable: bool = True
    max_replay_steps: int = 1_000_000
    config: Mapping[str, Any] = attrs.field(factory=dict)

    @property
    def kind(self) -> str:
        """Name of a simulator in messages."""
        return "world" if self.worlds else "environment"


class WorldAgent(NamedTuple):
    """Agent of a world, with its own spaces."""

    name: Any
    observation_space: spaces.Space[Any]
    action_space: spaces.Space[Any]


@attrs.frozen
class About:
    """Properties of simulators."""

    observation_space: spaces.Space[Any]  # of a row
    action_space: spaces.Space[Any]
    render_mode: str | None
    render_fps: float | None
    identities: list[int]
    agents: Sequence[WorldAgent] | None = None  # of a world

    @property
    def rows(self) -> int:
        """Number of rows of a simulator A."""
        return 1 if self.agents is None else len(self.agents)


class Stepper:
    """Base class of objects that reset and step simulators: all together, or some of them.

    Subclasses also define `begin`, `step`, `render` and `close`.
    """

    about: About
    episode_seeds: torch.Tensor  # (W,) int64 seeds of the current episodes; -1 before the first reset
    observation: Tree = None  # (N, *O) current observation, as of the last received step
    has_unused_masks = False  # whether the infos of a reset have masks that are not in the observation
    reusable = True  # whether new episodes can begin after an error
    sent: Any = ()  # simulators that were sent and not received
    busy = False  # whether simulators are being stepped
    restarts = 0  # of workers
    _ended: str | None = None

    @property
    def ended(self) -> str | None:
        """Text of the error that ended the episodes."""
        return self._ended

    def begin(self, current: Sequence[int] | None = None, keep_options: bool = False, /) -> Tree:
        """Begin the next episodes, or those with the seeds `current` and, with `keep_options`, the current options.

        Returns the observation (N, *O).
        """
        raise NotImplementedError

    def step(self, action: Tree, chosen: Sequence[int], /) -> TimeStep:
        """Step some simulators with the actions `(R, *A)` of their rows, in increasing order. Returns R rows."""
        raise NotImplementedError

    def render(self, index: int) -> Any:
        """Return a frame of one simulator."""
        raise NotImplementedError

    def close(self) -> None:
        """Close all simulators. A second call does nothing."""
        raise NotImplementedError

    def discard(self) -> None:
        """Forget the simulators that were sent, if possible. Workers cannot forget a request."""

    def options_changed(self, chosen: Sequence[int]) -> None:
        """React to new options of the next episodes of some simulators. By default, the next reset reads them."""

    def forget(self) -> None:
        """Let no simulator begin an episode on its own before `begin` or `load` is called."""


class Block(Stepper):
    """Simulators in this process. After an error, some may have been stepped and others not, so all must begin again.

    Args:
        setup: how they are made.
        numbers: their numbers among all simulators of the environment.
        seeds: seeds of their episodes, by default those of a worker, which the main process sets.
        options: reset options of their episodes.

    Raises:
        ValueError: if a simulator was made twice.
    """

    def __init__(
        self, setup: Setup, numbers: range, seeds: HostEpisodeSeeds | None = None, options: ResetOptions | None = None
    ) -> None:
        self.setup, self.numbers = setup, numbers
        self.seeds = seeds or HostEpisodeSeeds(len(numbers), None, numbers.start)
        self.options = options or ResetOptions(len(numbers))
        self.simulators: list[Any] = setup.make(numbers)
        try:
            self._prepare(setup, numbers)
        except BaseException:
            self.close()
            raise

    def _prepare(self, setup: Setup, numbers: range) -> None:
        """Set the attributes that depend on the simulators."""
        identities = [id(simulator.unwrapped) for simulator in self.simulators]
        if len({*identities}) < len(numbers):
            raise ValueError(f"{setup.name} returned the same environment twice; it must make a new one in each call")
        check_alike(setup, numbers, self.simulators)
        first = self.simulators[0]
        fps = getattr(first, "metadata", {}).get("render_fps")
        mode = getattr(first, "render_mode", None)
        agents = first.agents if setup.worlds else None
        self.about = About(first.observation_space, first.action_space, mode, fps, identities, agents)
        self._agents = self.about.rows
        self._observations = Codec("observation", first.observation_space)
        self._actions = Codec("action", first.action_space)
        num_rows = len(numbers) * self._agents
        self.history = ActionHistory(
            setup.name, first.action_space, num_rows, setup.max_replay_steps if setup.replayable else 0
        )
        self.place: Any = None  # (2,) in a worker: the simulator that is stepped or reset, and its episode seed
        self.alive = np.zeros(num_rows, np.bool_)  # agents of worlds that have not left
        of_worlds = range(num_rows if agents else 0)
        self._row_names = [_RowName(row, numbers, agents or (), self.seeds, self.history) for row in of_worlds]
        self._has_masks = entry(first.observation_space, ACTION_MASK) is not None
        self._looks_for_masks = setup.action_mask is None and ACTION_MASK not in setup.info
        observed = [agent.observation_space for agent in agents or ()] or [first.observation_space]
        self._looks_for_masks &= all(entry(space, ACTION_MASK) is None for space in observed)
        self.sent: list[int] = []  # simulators that `collect` steps
        self._to_take = zeros(first.action_space, (num_rows,))  # their actions

    @property
    def episode_seeds(self) -> torch.Tensor:  # type: ignore[override]  # computed
        """(W,) int64: seeds of the current episodes; -1 before the first reset."""
        return self.seeds.current

    def rows_of(self, chosen: Sequence[int]) -> Sequence[int]:
        """Return the rows (R,) of some simulators."""
        return chosen if self._agents == 1 else rows_of(chosen, self._agents)

    @ends_episodes
    def begin(self, current: Sequence[int] | None = None, keep_options: bool = False) -> Tree:
        """Begin new episodes, see `Stepper`."""
        chosen = range(len(self.numbers))
        seeds = [self.seeds.advance(index) for index in chosen] if current is None else current
        observation = self._observed(
            [self._begin_one(index, seed, keep_options) for index, seed in zip(chosen, seeds, strict=True)]
        )
        self.observation, self._ended = observation, None
        return observation

    @ends_episodes
    def begin_some(self, chosen: Sequence[int]) -> Tree:
        """Begin the next episodes of some simulators. Returns the current observation of all (N, *O)."""
        begun = self._observed([self._begin_one(index, self.seeds.advance(index)) for index in chosen], chosen)
        self._keep(chosen, begun)
        return self.observation

    def step(self, action: Tree, chosen: Sequence[int]) -> TimeStep:
        """Step some simulators, see `Stepper`."""
        return self._step(action, self._actions.split(action, len(chosen) * self._agents), chosen)

    @ends_episodes
    def _step(self, action: Tree, actions: Sequence[Any], chosen: Sequence[int]) -> TimeStep:
        rows, names = self.rows_of(chosen), self._names(chosen)
        results = self._results(actions, chosen)
        self.history.append(action, rows)
        observations, rewards, terminateds, truncateds, infos = self._parts(results, chosen)
        observation = final_observation = self._observations.stack(observations, names)
        ended_2R = ended_flags(terminateds, truncateds, names)
        nothing_R = np.zeros(len(rows), np.bool_)
        valid_R = torch.from_numpy(self.alive[rows] if self.setup.worlds else ~nothing_R)
        if ended_2R is None:
            terminated_R, truncated_R = torch.from_numpy(nothing_R), torch.from_numpy(nothing_R.copy())
        else:
            terminated_R, truncated_R = torch.from_numpy(ended_2R).unbind()
            over = self._over(ended_2R[0] | ended_2R[1], rows)
            begun = [*observations]
            for place in over:
                index, own_rows = chosen[place], slice(place * self._agents, (place + 1) * self._agents)
                begun[own_rows] = self._rows_in(self._begin_one(index, self.seeds.advance(index)))
            observation = self._observations.stack(begun, names)
            if self.setup.worlds and over:  # no episode ends in rows of agents that had left
                of_rows = zip(observations, begun, valid_R.tolist(), strict=True)
                final = [old if valid else new for old, new, valid in of_rows]
                final_observation = self._observations.stack(final, names)
        self._check_masks(observation, rows)
        self._keep(chosen, observation)
        return TimeStep(
            observation=observation,
            reward=torch.from_numpy(column("reward", rewards, _FLOAT, rows=names)),
            terminated=terminated_R,
            truncated=truncated_R,
            final_observation=final_observation,
            valid=valid_R,
            info={key: wanted_infos(infos, key, missing, names) for key, missing in self.setup.info.items()},
        )

    def submit(self, action: Tree, chosen: Sequence[int]) -> None:
        """Set the actions `(R, *A)` of some simulators, which `collect` steps."""
        put_actions(self._to_take, np.array(self.rows_of(chosen), np.int64), action)
        self.sent += chosen

    def collect(self, timeout: float | None) -> tuple[list[int], TimeStep]:
        """Step the simulators that were sent. Returns them, and their R rows."""
        chosen = self.sent
        self.discard()
        rows = self.rows_of(chosen)
        return chosen, self.step(map_tree(lambda x: torch.from_numpy(x[rows]), self._to_take), chosen)

    def discard(self) -> None:
        """Forget the simulators that were sent."""
        self.sent = []

    def save(self) -> dict[str, Any]:
        """Return the actions of the open episodes of all rows, and their numbers."""
        return self.history.state_dict()

    def load(self, state: Mapping[str, Any]) -> Tree:
        """Repeat the episodes of a state of these simulators. Returns the current observation (N, *O).

        Raises EnvironmentContractError if a repeated episode differs from the saved one.
        """
        actions, steps = state["actions"], state["steps"].tolist()
        replayed = [self._replay(index, actions, steps) for index in range(len(self.numbers))]
        observation = self._observed(replayed)
        for (path, value), (_, before) in zip(
            leaves(observation, "observation"), leaves(state["observation"]), strict=True
        ):
            same = value == restored({path: before}, path, value)
            wrong = (~same.reshape(len(steps), -1).all(1)).nonzero().flatten().tolist()
            if wrong:
                number = self.numbers[wrong[0] // self._agents]
                raise EnvironmentContractError(
                    f"{self.setup.name}: seed and actions did not reproduce {path} of {self.setup.kind} {number}, so it"
                    " is not replayable; give replayable=False, and a resumed run begins new episodes"
                )
        self.observation, self._ended = observation, None
        return observation

    def render(self, index: int) -> Any:
        """Return a frame of one simulator."""
        return self.simulators[index].render()

    def close(self) -> None:
        """Close all simulators."""
        while self.simulators:
            self.simulators.pop().close()

    def place_of(self, index: int) -> str:
        """Return the name of a simulator in messages, and its episode seed."""
        kind, name, seed = self.setup.kind, self.setup.name, self.seeds.of(index)
        return f"{kind} {self.numbers[index]} of {name}, episode seed {seed}"

    def _names(self, chosen: Sequence[int]) -> Sequence[Any]:
        """Return the names of the rows (R,) of some simulators in messages."""
        if self.setup.worlds:
            return [self._row_names[row] for row in self.rows_of(chosen)]
        return [self.numbers[index] for index in chosen] if self.numbers.start else chosen

    def _results(self, actions: Sequence[Any], chosen: Sequence[int]) -> list[Any]:
        """Return the results of `step` of some simulators."""
        results: list[Any] = []
        place, agents = self.place, self._agents
        if self.setup.worlds:
            actions = [actions[first : first + agents] for first in range(0, len(actions), agents)]
        index, simulators, add = -1, self.simulators, results.append
        try:
            for index, taken in zip(chosen, actions, strict=True):
                if place is not None:
                    place[:] = index, self.seeds.of(index)
                add(simulators[index].step(taken))
            if place is not None:
                place[0] = -1
        except Exception as error:  # re-raised with a note
            self._note(error, index, f", step {self.history.steps(index * self._agents)}")
            raise
        return results

    def _parts(self, results: Sequence[Any], chosen: Sequence[int]) -> Any:
        """Return observations, rewards, terminated, truncated and infos of R rows from the results of `step`."""
        try:
            parts = _, _, _, _, _ = tuple(zip(*results, strict=True))
        except (TypeError, ValueError):  # a result does not have five parts
            for index, result in zip(chosen, results, strict=True):
                number = self.numbers[index]
                check_parts(f"{self.setup.kind} {number} of {self.setup.name}", "step", result, STEP)
            raise
        return parts if not self.setup.worlds else [(*itertools.chain.from_iterable(part),) for part in parts]

    def _over(self, ended_R: np.ndarray[Any, Any], rows: Sequence[int]) -> list[int]:
        """Return the places of simulators whose episodes are over, all of whose rows have ended."""
        if not self.setup.worlds:
            return ended_R.nonzero()[0].tolist()
        self.alive[rows] &= ~ended_R
        return np.flatnonzero(~self.alive[rows].reshape(-1, self._agents).any(1)).tolist()

    def _rows_in(self, observations: Any) -> Sequence[Any]:
        """Return the observations of the rows of one simulator."""
        return observations if self.setup.worlds else [observations]

    def _observed(self, begun: Sequence[Any], chosen: Sequence[int] | None = None) -> Tree:
        """Return the observations of some simulators as new tensors `(R, *O)`."""
        chosen = range(len(self.numbers)) if chosen is None else chosen
        rows = [row for one in begun for row in self._rows_in(one)]
        observation = self._observations.stack(rows, self._names(chosen))
        self._check_masks(observation, self.rows_of(chosen))
        return observation

    def _check_masks(self, observation: Tree, rows: Sequence[int]) -> None:
        if not self._has_masks:
            return
        spaces_ = self.about.observation_space, self.about.action_space
        alive_R = self.alive[rows] if self.setup.worlds else None
        first = self.numbers.start * self._agents
        check_masks(observation, *spaces_, alive_R, [first + row for row in rows] if first else rows)

    def _begin_one(self, index: int, seed: int, keep_options: bool = False) -> Any:
        """Begin an episode with the next options of a simulator, or with its current ones."""
        for row in range(index * self._agents, (index + 1) * self._agents):
            self.history.clear(row)
            self.alive[row] = True
        if self.place is not None:
            self.place[:] = index, seed
        options = self.options.of(index) if keep_options else self.options.begin(index)
        try:
            result = self.simulators[index].reset(seed=seed, **as_keywords(options))
        except Exception as error:  # re-raised with a note
            self._note(error, index, ", in its reset")
            _explain_reset(self.setup.name, error)
            raise
        check_parts(f"{self.setup.kind} {self.numbers[index]} of {self.setup.name}", "reset", result, RESET)
        if self._looks_for_masks:
            infos = result[1] if self.setup.worlds else [result[1]]
            self.has_unused_masks = any(isinstance(info, Mapping) and ACTION_MASK in info for info in infos)
            self._looks_for_masks = False
        if self.place is not None:
            self.place[0] = -1
        return result[0]

    def _replay(self, index: int, actions: Sequence[Tree], steps: Sequence[int]) -> Any:
        """Repeat the open episode of a simulator. Returns its last observation."""
        rows = range(index * self._agents, (index + 1) * self._agents)
        for row in rows:
            for path, leaf in leaves(actions[row], f"actions.{row}"):
                if len(leaf) != steps[row]:
                    raise ValueError(f"{path}: the state has {len(leaf)} actions, but {steps[row]} steps were taken")
        observation = self._begin_one(index, self.seeds.of(index), keep_options=True)
        taken = zip(*(self._actions.split(actions[row], steps[row]) for row in rows), strict=True)
        step = -1
        try:
            for together in taken:
                step += 1
                result = self.simulators[index].step(together if self.setup.worlds else together[0])
                observation = result[0]
                if self.setup.worlds:
                    self.alive[[*rows]] &= ~np.logical_or(result[2], result[3])
        except Exception as error:  # re-raised with a note
            self._note(error, index, f", step {step}, repeated by the resume")
            raise
        for row in rows:
            self.history.restore(row, actions[row], steps[row])
        return observation

    def _keep(self, chosen: Sequence[int], observation: Tree) -> None:
        """Set the current observations (R, *O) of some simulators. A range has all."""
        if not isinstance(chosen, range):
            observation = with_rows(self.observation, self.rows_of(chosen), observation)
        self.observation = observation

    def _note(self, error: Exception, index: int, when: str) -> None:
        error.add_note(f"in {self.place_of(index)}{when}")


class _RowName:
    """Name of a row of a world in messages, with its agent, episode seed and step."""

    def __init__(
        self, row: int, numbers: range, agents: Sequence[WorldAgent], seeds: HostEpisodeSeeds, history: ActionHistory
    ) -> None:
        self._row, self._numbers, self._agents, self._seeds, self._history = row, numbers, agents, seeds, history

    def __str__(self) -> str:
        world, agent = divmod(self._row, len(self._agents))
        row = self._numbers[world] * len(self._agents) + agent
        when = f"episode seed {self._seeds.of(world)}, step {max(self._history.steps(self._row) - 1, 0)}"
        return f"{row} (world {self._numbers[world]}, agent {self._agents[agent].name!r}, {when})"


def check_alike(setup: Setup, numbers: Sequence[int], parts: Sequence[Any]) -> None:
    """Raise ValueError unless simulators with these numbers, or groups of them, have equal spaces and agents."""
    kinds = ("observation_space", "action_space", *(["agents"] if setup.worlds else []))
    for kind in kinds:
        first = getattr(parts[0], kind)
        for number, part in zip(numbers, parts, strict=True):
            if (other := getattr(part, kind)) != first:
                shown = (first, other)
                if kind == "agents":
                    shown = [agent.name for agent in first], [agent.name for agent in other]
                raise ValueError(
                    f"{setup.name}: {setup.kind} {numbers[0]} has the {kind} {shown[0]}, {setup.kind} {number} "
                    f"{shown[1]}; all {setup.kind}s must have equal {'agents' if kind == 'agents' else 'spaces'}"
                )


def rows_of(chosen: Sequence[int], agents: int) -> list[int]:
    """Return the rows of some worlds."""
    return [row for index in chosen for row in range(index * agents, (index + 1) * agents)]


def check_row_count(action: Tree, rows: int) -> None:
    """Raise EnvironmentContractError unless all tensors of an action have this number of rows."""
    for path, leaf in leaves(action, "action"):
        if leaf.shape[:1] != (rows,):
            raise EnvironmentContractError(f"{path}: expected a tensor of {rows} rows, got {tuple(leaf.shape)}")


def with_rows(tree: Any, rows: Sequence[int], new: Any) -> Any:
    """Return a copy of `tree` (N, ...) with some rows replaced by `new` (R, ...)."""
    row_R = torch.tensor(rows, dtype=torch.int64, device="cpu")
    return map_tree(lambda x, new_R: x.index_copy(0, row_R, new_R), tree, new)


def _explain_reset(name: str, error: Exception) -> None:
    """Raise TypeError with instructions if `reset` takes no seed or no options, as in Gym before version 0.26."""
    if isinstance(error, TypeError) and "reset() got an unexpected keyword argument" in str(error):
        raise TypeError(
            f"{name}: {error}. Define `def reset(self, *, seed=None, options=None)`, call `super().reset(seed=seed)`"
            " first, draw random numbers from `self.np_random`, and return `observation, {}`"
        ) from error
