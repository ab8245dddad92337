"""Adapter for PettingZoo's parallel environments: W worlds of A agents as W * A rows.

Shapes: W worlds, A agents of a world, N = W * A rows.
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

from rein.envs.base.contract import checked_count
from rein.envs.gymnasium.adapter import as_json, name_of
from rein.envs.host.block import Setup, WorldAgent, check_row_count
from rein.envs.host.environment import SteppedSeparately
from rein.envs.host.masks import check_has_mask, missing_masks
from rein.envs.host.options import Options
from rein.envs.host.results import RESET, STEP, check_parts, missing_values
from rein.envs.host.supervision import workers_of
from rein.errors import EnvironmentContractError
from rein.spaces import ACTION_MASK, entry
from rein.spaces.common import append_agent_id, check_sizes, common_space, masks_of_sizes, padded, with_agent_id
from rein.spaces.masks import as_mask, folded, folded_space
from rein.types import Group, Tree


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
        found = {}
        for name, numbers in members.items():
            row_R = (first_W1 + torch.tensor(numbers, dtype=torch.int64, device="cpu")).flatten()
            first, *others = (self._of_world[number][1:] for number in numbers)
            alike = all(other == first for other in others)
            found[name] = Group(row_R, *(first if alike else (self.single_observation_space, self.single_action_space)))
        return found

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
        given = {self._names[agent]: self._of_agent(agent, actions[agent]) for agent in here}
        observations, *parts, infos = self._parts("step", self.unwrapped.step(given), STEP)
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
