"""Adapter for PettingZoo's parallel environments: W worlds of A agents as W * A rows.

Shapes: W worlds, A agents of a world, N = W * A rows.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from rein.envs.base.contract import check_action, check_rows_of, checked_count, representation, restored
from rein.envs.base.seeding import HostEpisodeSeeds
from rein.envs.base.step_checks import (
    CLOSED,
    RESET,
    STEP,
    check_begun,
    check_open,
    check_parts,
    ended_flags,
    ends_episodes,
    rewards_of,
)
from rein.envs.gymnasium.adapter import as_json, name_of
from rein.envs.gymnasium.async_vector_env import Workers, in_processes, portable
from rein.envs.gymnasium.history import ActionHistory
from rein.envs.gymnasium.masks import check_has_mask, missing_masks, warn_of_mask
from rein.errors import EnvironmentContractError, explain
from rein.ops.trees import leaves
from rein.spaces import ACTION_MASK, entry
from rein.spaces.common import append_agent_id, check_sizes, common_space, masks_of_sizes, padded, with_agent_id
from rein.spaces.conversion import Codec
from rein.spaces.masks import as_mask, check_masks, folded, folded_space
from rein.types import Group, TimeStep, Tree

logger = logging.getLogger(__name__)

_RESULTS = "observation", "reward", "terminated", "truncated"  # of a step


@explain("ENVIRONMENT_ATTRIBUTES")
class PettingZooEnvironment:
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
        action_mask: add `info["action_mask"]` of each agent to its observation, as in `GymnasiumEnvironment`. Masks in
            observations need no option.
        processes: step each world in a separate process, for environments that take milliseconds per step.
        timeout: seconds that a call may take in processes; None for no limit.
        replayable: whether a seed and actions reproduce an episode. False, for instance, if it depends on a clock.
        max_replay_steps: steps of an open episode that a resumed run can repeat.
        **make_kwargs: keyword arguments of the function.

    Raises:
        TypeError: if the function does not return a parallel environment, or if the spaces of agents differ in another
            way than in their size.
        ValueError: if only continuous actions would have masks, if there is a timeout without processes, or if the
            function returns the same environment twice.
        WorkerDied: if a process ends while it makes its world.
    """

    steps_separately = True  # `apply_action_where` costs less than stepping all worlds

    @torch.inference_mode(False)
    def __init__(
        self,
        make_parallel_env: Callable[..., Any],
        worlds: int = 1,
        seed: int | None = None,
        *,
        agent_id: bool = False,
        action_mask: bool | None = None,
        processes: bool = False,
        timeout: float | None = None,
        replayable: bool = True,
        max_replay_steps: int = 1_000_000,
        **make_kwargs: Any,
    ) -> None:
        if not callable(make_parallel_env):
            raise TypeError(
                f"PettingZooEnvironment({make_parallel_env!r:.80}): give a function that returns a parallel "
                "environment, such as simple_spread_v3.parallel_env, and worlds= for several worlds"
            )
        self.worlds = checked_count(f"worlds={worlds!r}", worlds)
        self._name = name_of(make_parallel_env)
        if timeout is not None and not processes:
            raise ValueError(f"timeout={timeout}: give processes=True as well, because only processes have a timeout")
        kind = _WorldInWorker if processes else _World
        make = functools.partial(kind, make_parallel_env, make_kwargs, self._name, bool(action_mask))
        self._processes = _Processes(make, self._name, self.worlds, timeout) if processes else None
        self._envs = [] if processes else _made_all(make, self._name, self.worlds)
        self.agent_id, self.action_mask, self.replayable = agent_id, action_mask, replayable
        self.processes, self.timeout = processes, timeout
        try:
            self._set_spaces()
        except BaseException:
            self.close()
            raise
        self.num_envs = self.worlds * len(self._names)
        self.device = torch.device("cpu")
        self._make_kwargs = make_kwargs
        self._seeds = HostEpisodeSeeds(self.worlds, seed)
        self._observations = Codec("observation", self.single_observation_space)
        self._actions = Codec("action", self.single_action_space)
        self._rows: list[Any] = [None] * self.num_envs  # last observation of each agent
        self._alive = [False] * self.num_envs
        self._observation: Tree = None  # the current observation; None before a reset
        self._ended: str | None = None  # the error that ended the episodes, or CLOSED
        kept = max_replay_steps if replayable else 0
        self._history = ActionHistory(self._name, self.single_action_space, self.num_envs, kept)
        self._row_names = [_RowName(row, self._names, self._seeds, self._history) for row in range(self.num_envs)]
        self._checked = False

    def _set_spaces(self) -> None:
        about = self._envs[0].about() if self._processes is None else self._processes.call("about", {0: ()})[0]
        self._names, self._observation_spaces, self._action_spaces, self._render_fps = about
        self._unpadded_spaces = self._observation_spaces
        self.single_action_space = common_space(self._name, "action", self._action_spaces)
        if self.agent_id:
            self._observation_spaces = with_agent_id(self._name, self._observation_spaces)
        self.single_observation_space = common_space(self._name, "observation", self._observation_spaces)
        self._masks = None  # of the actions (A,) that each agent has, if the observation needs such masks
        if entry(self.single_observation_space, ACTION_MASK) is None:
            self._masks = masks_of_sizes(self.single_action_space, self._action_spaces)
        if self._masks is not None:
            mask_space = spaces.MultiBinary(len(self._masks[0]))
            self.single_observation_space = folded_space(self.single_observation_space, mask_space)

    @property
    def groups(self) -> dict[str, Group]:
        """Groups of agents by name, with their original spaces, or with padded vectors if `agent_id` is set.

        A group whose agents have different spaces has the spaces of a row.
        """
        members: dict[str, list[int]] = {}
        for agent, name in enumerate(self._names):
            members.setdefault(re.sub(r"[_-]?\d+$", "", str(name)) or "agent", []).append(agent)
        first_W1 = torch.arange(0, self.num_envs, len(self._names), device="cpu")[:, None]
        found = {}
        for name, agents in members.items():
            row_R = (first_W1 + torch.tensor(agents, dtype=torch.int64, device="cpu")).flatten()
            first, *others = ((self._observation_spaces[agent], self._action_spaces[agent]) for agent in agents)
            alike = all(other == first for other in others)
            found[name] = Group(row_R, *(first if alike else (self.single_observation_space, self.single_action_space)))
        return found

    @property
    def seed(self) -> int | None:
        """Random seed of all worlds; None until given or drawn at the first reset."""
        return self._seeds.seed

    @property
    def episode_seeds(self) -> Tensor:
        """(N,) int64: seeds of the current episodes, equal in all rows of a world; -1 before the first reset."""
        return self._seeds.current.repeat_interleave(len(self._names))

    @property
    def awaits_reset(self) -> bool:
        """Whether `reset` must be called before a step: before the first reset, and after a resume without episodes."""
        return self._observation is None

    @property
    def config(self) -> dict[str, Any]:
        """Constructor options, as JSON values."""
        return {
            "id": self._name,
            "worlds": self.worlds,
            "seed": self.seed,
            "agent_id": self.agent_id,
            "action_mask": self.action_mask,
            "processes": self.processes,
            "timeout": self.timeout,
            "replayable": self.replayable,
            "make_kwargs": {key: as_json(value) for key, value in self._make_kwargs.items()},
        }

    @property
    def render_fps(self) -> float | None:
        """Frames per second in the metadata of the environment, or None."""
        return self._render_fps

    def render(self, index: int = 0) -> Any:
        """Return an RGB frame of the world of one row. Build the environment with `render_mode="rgb_array"`."""
        world = range(self.num_envs)[index] // len(self._names)
        return self._call("render", {world: ()})[world]

    def reset(self, seed: int | None = None) -> Tree:
        """Begin the next episode of every world, from episode 0 if `seed` is given. Returns the observation."""
        check_open(self._name, "reset", self._ended)
        if seed is not None:
            self._seeds.restart(seed)
        return self._begin([self._seeds.advance(world) for world in range(self.worlds)])

    def reset_to(self, episode_seeds: Tensor) -> Tree:
        """Begin the episodes with these seeds (N,), for a replay. Later episodes are seeded as usual.

        Raises ValueError if the rows of a world have different seeds.
        """
        check_open(self._name, "reset_to", self._ended)
        check_rows_of("reset_to", episode_seeds, self.num_envs, torch.int64)
        seed_WA = episode_seeds.view(self.worlds, -1)
        if not torch.equal(seed_WA, seed_WA[:, :1].expand_as(seed_WA)):
            raise ValueError(f"reset_to: expected one seed for all rows of a world, got {episode_seeds}")
        return self._begin(self._seeds.override(seed_WA[:, 0]))

    def apply_action(self, action: Tree) -> TimeStep:
        """Step every world with actions `(N, *A)`.

        Raises RuntimeError before the first reset, and EnvironmentContractError for an action or a result that does not
        fit its space. Exceptions of an environment get a note with the world, the episode seed and the step.
        After such an error, some worlds have been stepped and others have not, and `reset` must be called.
        """
        return self._apply(action, range(self.worlds))

    def apply_action_where(self, action: Tree, mask: Tensor) -> TimeStep:
        """Step every world with a row in `mask` (N,). The rows of other worlds do not change and are not valid.

        Raises ValueError for an invalid mask, and the errors of `apply_action`.
        """
        check_rows_of("apply_action_where", mask, self.num_envs, torch.bool)
        return self._apply(action, mask.view(self.worlds, -1).any(1).nonzero().flatten().tolist())

    def _apply(self, action: Tree, worlds: Sequence[int]) -> TimeStep:
        if self._processes is not None:
            self._processes.workers.check()
        check_begun(self._name, "apply_action", self._observation is not None, self._ended)
        if not self._checked:
            check_action(action, self.num_envs, self.single_action_space)
            self._checked = True
        actions, agents = self._actions.split(action, self.num_envs), len(self._names)
        chosen = {world: self._by_agent(world, actions[world * agents : (world + 1) * agents]) for world in worlds}
        return self._step_worlds(action, chosen)

    @ends_episodes
    def _step_worlds(self, action: Tree, chosen: Mapping[int, Mapping[Any, Any]]) -> TimeStep:
        """Step worlds with the actions of their agents, which `action` (N, *A) has as rows."""
        agents = len(self._names)
        row_R = [world * agents + agent for world in chosen for agent in range(agents)]
        valid = [False] * self.num_envs
        for row in row_R:
            valid[row] = self._alive[row]
        reward_N, flags_2N = self._step(chosen)
        self._history.append(action, row_R)
        final_observation = observation = self._observations.stack(self._rows)
        over = [world for world in chosen if not any(self._alive[world * agents : (world + 1) * agents])]
        if over:
            final = [*self._rows]
            self._begin_worlds({world: self._seeds.advance(world) for world in over})
            observation = self._observations.stack(self._rows)
            for row in range(self.num_envs):
                if not valid[row]:  # no episode ends in this row
                    final[row] = self._rows[row]
            final_observation = self._observations.stack(final)
        self._check_masks(observation)
        self._observation = observation
        ended = torch.from_numpy(flags_2N)
        valid_N = torch.tensor(valid, dtype=torch.bool, device="cpu")
        return TimeStep(observation, torch.from_numpy(reward_N), ended[0], ended[1], final_observation, valid_N, {})

    def reseed(self, seed: int) -> None:
        """Set the random seed. Raises RuntimeError after the first reset."""
        self._seeds.reseed(seed)

    def close(self) -> None:
        """Close every environment. A second call does nothing."""
        self._observation, self._ended = None, CLOSED
        while self._envs:
            self._envs.pop().close()
        if self._processes is not None:
            self._processes.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the seeds of the current episodes and, if they are replayable, their actions so far."""
        return {"seeds": self._seeds.state_dict(), "observation": self._observation, **self._history.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Reset with the saved seeds and repeat the actions. Without saved actions, `reset` must be called next.

        Raises ValueError for the state of other worlds, and EnvironmentContractError if a repeated episode differs from
        the saved one.
        """
        self._seeds.load_state_dict(state["seeds"])
        self._observation = None
        saved, actions = state["observation"], state["actions"]
        steps = restored(state, "steps", self.episode_seeds).tolist()
        if saved is None:
            return
        if not self.replayable or min(steps) < 0:
            logger.warning("%s: open episodes cannot be repeated, so reset() begins new ones", self._name)
            return
        agents = len(self._names)
        for world in range(self.worlds):
            rows = range(world * agents, (world + 1) * agents)
            self._begin_worlds({world: self._seeds.of(world)})
            taken = [self._actions.split(actions[row], steps[row]) for row in rows]
            for together in zip(*taken, strict=True):
                self._step({world: self._by_agent(world, together)})
            for row in rows:
                self._history.restore(row, actions[row], steps[row])
        observation = self._observations.stack(self._rows)
        for (path, value), (_, before) in zip(leaves(observation, "observation"), leaves(saved), strict=True):
            if not torch.equal(value, before):
                raise EnvironmentContractError(
                    f"{self._name}: seed and actions did not reproduce {path}, so it is not replayable; give "
                    "replayable=False, and a resumed run begins new episodes"
                )
        self._observation = observation

    def __repr__(self) -> str:
        return representation(self, repr(self._name), f"worlds={self.worlds}, agents={len(self._names)}")

    @ends_episodes
    def _begin(self, seeds: Sequence[int]) -> Tree:
        self._begin_worlds(dict(enumerate(seeds)))
        self._observation, self._ended = self._observations.stack(self._rows), None
        self._check_masks(self._observation)
        return self._observation

    def _begin_worlds(self, seeds: Mapping[int, int]) -> None:
        for world, (observations, has_mask) in self._call("begin", {w: (seed,) for w, seed in seeds.items()}).items():
            if has_mask and self.action_mask is None:
                warn_of_mask(self._name, {ACTION_MASK: True})
            if absent := [name for name in self._names if name not in observations]:
                raise EnvironmentContractError(
                    f"{self._name}, world {world}: reset returned no observation of {', '.join(map(repr, absent))}; "
                    "all possible_agents must take part in an episode from its first step"
                )
            for agent, name in enumerate(self._names):
                row = world * len(self._names) + agent
                self._history.clear(row)
                self._alive[row] = True
                self._rows[row] = self._row(agent, observations[name])

    def _by_agent(self, world: int, actions: Sequence[Any]) -> dict[Any, Any]:
        """Return the actions of the agents of a world that have not left, by agent."""
        first = world * len(self._names)
        return {self._names[agent]: self._of_agent(first + agent, actions[agent]) for agent in self._present(world)}

    def _present(self, world: int) -> list[int]:
        """Return the agents of a world that have not left."""
        first = world * len(self._names)
        return [agent for agent in range(len(self._names)) if self._alive[first + agent]]

    def _step(self, chosen: Mapping[int, Mapping[Any, Any]]) -> tuple[Any, Any]:
        """Step worlds with the actions of their agents. Returns rewards (N,), and terminated and truncated (2, N)."""
        rows: list[int] = []
        parts: list[list[Any]] = [[] for _ in _RESULTS]
        for world, result in self._call("take", {world: (actions,) for world, actions in chosen.items()}).items():
            for agent in self._present(world):
                rows.append(world * len(self._names) + agent)
                for what, part, values in zip(_RESULTS, result, parts, strict=True):
                    if (name := self._names[agent]) not in part:
                        raise EnvironmentContractError(
                            f"{self._place(world)}: step returned no {what} of {name!r}, which has neither terminated "
                            "nor been truncated"
                        )
                    values.append(part[name])
        names = [self._row_names[row] for row in rows]
        reward_N, flags_2N = np.zeros(self.num_envs, np.float32), np.zeros((2, self.num_envs), np.bool_)
        reward_N[rows] = rewards_of(parts[1], names)
        ended_2R = ended_flags(tuple(parts[2]), tuple(parts[3]), names)
        if ended_2R is not None:
            flags_2N[:, rows] = ended_2R
            for row, flags_2 in zip(rows, ended_2R.T, strict=True):
                self._alive[row] = not flags_2.any()
        for row, observation in zip(rows, parts[0], strict=True):
            self._rows[row] = self._row(row % len(self._names), observation)
        return reward_N, flags_2N

    def _call(self, method: str, arguments: Mapping[int, tuple[Any, ...]]) -> dict[int, Any]:
        """Call a method of worlds with their arguments. Returns the results by world."""
        if self._processes is not None:
            return self._processes.call(method, arguments, self._seeds.of)
        return {world: self._noted(world, getattr(self._envs[world], method), *x) for world, x in arguments.items()}

    def _noted(self, world: int, method: Callable[..., Any], *args: Any) -> Any:
        try:
            return method(*args)
        except Exception as error:  # re-raised with a note
            error.add_note(f"in {self._place(world)}")
            raise

    def _place(self, world: int) -> str:
        step, seed = self._history.steps(world * len(self._names)), self._seeds.of(world)
        return f"world {world} of {self._name}, episode seed {seed}, step {step}"

    def _check_masks(self, observation: Tree) -> None:
        check_masks(observation, self.single_observation_space, self.single_action_space, np.array(self._alive))

    def _row(self, agent: int, observation: Any) -> Any:
        """Return a copy of the observation of an agent in the space of a row.

        Raises EnvironmentContractError for a vector of another size than the space of the agent.
        """
        check_sizes(f"{self._name}: observation of {self._names[agent]!r}", observation, self._unpadded_spaces[agent])
        if self.agent_id:
            observation = append_agent_id(observation, self._observation_spaces[agent], agent, len(self._names))
        if self._masks is not None:
            observation = folded(observation, self._masks[agent])
        return padded(observation, self.single_observation_space)

    def _of_agent(self, row: int, action: Any) -> Any:
        """Return the action of a row as an action of its agent.

        Raises EnvironmentContractError for an action that the agent does not have.
        """
        agent = row % len(self._names)
        space = self._action_spaces[agent]
        if isinstance(space, spaces.Discrete) and action >= space.start + space.n:
            last = int(space.start + space.n) - 1
            raise EnvironmentContractError(
                f"action, row {row}: the agent {self._names[agent]!r} of {self._name} has the actions {space.start} to "
                f"{last}, got {action}; choose an action that the entry 'action_mask' of the observation allows"
            )
        return action[: space.shape[0]] if isinstance(space, spaces.Box) and len(space.shape) == 1 else action


class _RowName:
    """Name of a row in messages, with its world, agent, episode seed and step."""

    def __init__(self, row: int, agents: Sequence[Any], seeds: HostEpisodeSeeds, history: ActionHistory) -> None:
        self._row, self._agents, self._seeds, self._history = row, agents, seeds, history

    def __str__(self) -> str:
        world, agent = divmod(self._row, len(self._agents))
        when = f"episode seed {self._seeds.of(world)}, step {self._history.steps(self._row)}"
        return f"{self._row} (world {world}, agent {self._agents[agent]!r}, {when})"


class _World(gymnasium.Env[Any, Any]):
    """A parallel environment, in the process that steps it. Its spaces are dictionaries by agent."""

    def __init__(self, make: Callable[..., Any], make_kwargs: Mapping[str, Any], name: str, action_mask: bool) -> None:
        self.inner, self._name = _made(make, make_kwargs, name), name
        names = self._names = list(self.inner.possible_agents)
        observed = {name: self.inner.observation_space(name) for name in names}
        taken = {name: self.inner.action_space(name) for name in names}
        self._masks: dict[Any, spaces.Space[Any]] = {}  # by agent, of the masks to add
        for agent in names if action_mask else ():
            if mask := missing_masks(name, SimpleNamespace(observation_space=observed[agent]), taken[agent]):
                self._masks[agent] = mask
                observed[agent] = folded_space(observed[agent], mask)
        self._spaces = [*observed.values()], [*taken.values()]
        self.observation_space = spaces.Dict({str(name): space for name, space in observed.items()})
        self.action_space = spaces.Dict({str(name): space for name, space in taken.items()})

    def about(self) -> tuple[list[Any], list[spaces.Space[Any]], list[spaces.Space[Any]], float | None]:
        """Return the agents, their observation spaces and action spaces, and the frames per second."""
        return self._names, *self._spaces, getattr(self.inner, "metadata", {}).get("render_fps")

    def begin(self, seed: int) -> tuple[dict[Any, Any], bool]:
        """Reset. Returns observations by agent, and whether the infos have masks."""
        observations, infos = self._parts("reset", self.inner.reset(seed=seed), RESET)
        for name in self._masks.keys() & observations.keys():
            check_has_mask(self._name, infos.get(name, {}))
        has_mask = any(isinstance(info, Mapping) and ACTION_MASK in info for info in infos.values())
        return self._folded(observations, infos), has_mask

    def take(self, actions: Mapping[Any, Any]) -> tuple[dict[Any, Any], Any, Any, Any]:
        """Step. Returns observations, rewards, terminated and truncated by agent."""
        observations, rewards, terminated, truncated, infos = self._parts("step", self.inner.step(actions), STEP)
        return self._folded(observations, infos), rewards, terminated, truncated

    def render(self) -> Any:
        """Return an RGB frame. Raises ValueError if there is none."""
        frame = self.inner.render()
        if frame is None:
            raise ValueError(f"{self._name}: render() returned no frame; give render_mode='rgb_array'")
        return frame

    def close(self) -> None:
        """Close the parallel environment."""
        self.inner.close()

    def _parts(self, method: str, result: Any, parts: tuple[str, ...]) -> Any:
        check_parts(self._name, method, result, parts)
        for part, value in zip(parts, result, strict=True):
            if not isinstance(value, Mapping):
                raise EnvironmentContractError(
                    f"{self._name}: {method} must return {part} as a dictionary by agent, got {value!r:.200}"
                )
        return result

    def _folded(self, observations: Mapping[Any, Any], infos: Mapping[Any, Any]) -> dict[Any, Any]:
        given = dict(observations)
        for name in self._masks.keys() & given.keys():
            who = f"{self._name}: info.{ACTION_MASK} of {name}"
            mask = as_mask(self._masks[name], infos.get(name, {}).get(ACTION_MASK), who)
            given[name] = folded(given[name], mask)
        return given


class _WorldInWorker(_World):
    """A parallel environment in a worker process, whose errors can be pickled."""

    def begin(self, seed: int) -> tuple[dict[Any, Any], bool]:
        """Reset, as `_World` does."""
        with portable():
            return super().begin(seed)

    def take(self, actions: Mapping[Any, Any]) -> tuple[dict[Any, Any], Any, Any, Any]:
        """Step, as `_World` does."""
        with portable():
            return super().take(actions)

    def render(self) -> Any:
        """Render, as `_World` does."""
        with portable():
            return super().render()


class _Processes:
    """Worlds with one process each."""

    def __init__(self, make: Callable[[], _World], name: str, worlds: int, timeout: float | None) -> None:
        make.__module__, _, make.__qualname__ = name.partition(":")  # used in error messages
        self.workers = Workers(in_processes(make, worlds), name, timeout)
        self._closed = False

    def call(
        self, method: str, arguments: Mapping[int, tuple[Any, ...]], seed_of: Callable[[int], int] = lambda _: -1
    ) -> dict[int, Any]:
        """Call a method of worlds at the same time, and explain failures of their processes."""
        self.workers.check()
        try:
            return self.workers.call(method, arguments)
        except BaseException as error:  # re-raised or explained; also KeyboardInterrupt, which leaves answers pending
            self.workers.explain(error, seed_of)
            raise

    def close(self) -> None:
        """Close all worlds. A second call does nothing."""
        if not self._closed:
            self._closed = True
            self.workers.close()


def _made_all(make: Callable[[], _World], name: str, worlds: int) -> list[_World]:
    """Return all worlds. Raises ValueError if they share an environment."""
    made = [make() for _ in range(worlds)]
    if len({id(world.inner) for world in made}) < worlds:
        raise ValueError(
            f"{name} returned the same environment twice; give a function that makes a new one each time it is called"
        )
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
