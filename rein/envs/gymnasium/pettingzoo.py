"""Adapter for PettingZoo's parallel environments: W worlds of A agents as W * A rows.

Shapes: W worlds, A agents of a world, N = W * A rows.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from rein.envs.base.contract import check_action, check_rows_of, checked_count, restored
from rein.envs.base.seeding import HostEpisodeSeeds
from rein.envs.base.spaces import Codec, column, representation
from rein.envs.gymnasium.adapter import as_json, name_of
from rein.envs.gymnasium.history import ActionHistory
from rein.errors import EnvironmentContractError
from rein.foreign_names import ENVIRONMENT_ATTRIBUTES, explain
from rein.ops.trees import leaves
from rein.types import Group, TimeStep, Tree

logger = logging.getLogger(__name__)

_FLOAT = np.dtype(np.float32)


@explain(ENVIRONMENT_ATTRIBUTES)
class PettingZooEnvironment:
    """W worlds of a parallel environment of PettingZoo, with a row for each of its `possible_agents`.

    All rows have one observation space and one action space. If those of the agents differ, vectors are padded with
    zeros, and `Discrete` spaces get the largest number of actions. An action that an agent does not have becomes its
    last action. The agents of a group have equal names except for their numbers, as `adversary_0` and `adversary_1`.

    Example::

        from mpe2 import simple_spread_v3

        env = rein.PettingZooEnvironment(simple_spread_v3.parallel_env, worlds=8, seed=0)

    Args:
        make_parallel_env: function that returns a parallel environment.
        worlds: number of worlds W.
        seed: random seed of all worlds. By default it is drawn at the first reset.
        agent_id: append a one-hot vector of the agent's number to observations, which must be vectors.
        replayable: whether a seed and actions reproduce an episode. False, for instance, if it depends on a clock.
        max_replay_steps: steps of an open episode that a resumed run can repeat.
        **make_kwargs: keyword arguments of the function.

    Raises:
        TypeError: if the function does not return a parallel environment, or if the spaces of agents differ in another
            way than in their size.
    """

    @torch.inference_mode(False)
    def __init__(
        self,
        make_parallel_env: Callable[..., Any],
        worlds: int = 1,
        seed: int | None = None,
        *,
        agent_id: bool = False,
        replayable: bool = True,
        max_replay_steps: int = 1_000_000,
        **make_kwargs: Any,
    ) -> None:
        self.worlds = checked_count(f"worlds={worlds!r}", worlds)
        self._name = name_of(make_parallel_env)
        self._envs = [_made(make_parallel_env, make_kwargs, self._name) for _ in range(self.worlds)]
        self._names = list(self._envs[0].possible_agents)
        self._observation_spaces = [self._envs[0].observation_space(name) for name in self._names]
        self._action_spaces = [self._envs[0].action_space(name) for name in self._names]
        self.single_observation_space = _common(self._name, "observation", self._observation_spaces)
        self.single_action_space = _common(self._name, "action", self._action_spaces)
        if agent_id:
            self.single_observation_space = _with_id(self._name, self.single_observation_space, len(self._names))
        self.num_envs = self.worlds * len(self._names)
        self.agent_id, self.replayable = agent_id, replayable
        self.device = torch.device("cpu")
        self._make_kwargs = make_kwargs
        self._seeds = HostEpisodeSeeds(self.worlds, seed)
        self._observations = Codec("observation", self.single_observation_space)
        self._actions = Codec("action", self.single_action_space)
        self._rows: list[Any] = [None] * self.num_envs  # last observation of each agent
        self._alive = [False] * self.num_envs
        self._observation: Tree = None  # the current observation; None before a reset
        kept = max_replay_steps if replayable else 0
        self._history = ActionHistory(self._name, self.single_action_space, self.num_envs, kept)
        self._checked = False

    @property
    def groups(self) -> dict[str, Group]:
        """Groups of agents by name, with their original spaces, or the padded observations if `agent_id` is set."""
        members: dict[str, list[int]] = {}
        for agent, name in enumerate(self._names):
            members.setdefault(re.sub(r"[_-]?\d+$", "", str(name)) or "agent", []).append(agent)
        first_W1 = torch.arange(0, self.num_envs, len(self._names), device="cpu")[:, None]
        found = {}
        for name, agents in members.items():
            row_R = (first_W1 + torch.tensor(agents, dtype=torch.int64, device="cpu")).flatten()
            seen = self.single_observation_space if self.agent_id else self._observation_spaces[agents[0]]
            found[name] = Group(row_R, seen, self._action_spaces[agents[0]])
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
            "replayable": self.replayable,
            "make_kwargs": {key: as_json(value) for key, value in self._make_kwargs.items()},
        }

    @property
    def render_fps(self) -> float | None:
        """Frames per second in the metadata of the environment, or None."""
        return getattr(self._envs[0], "metadata", {}).get("render_fps")

    def render(self, index: int = 0) -> Any:
        """Return an RGB frame of the world of one row. Build the environment with `render_mode="rgb_array"`."""
        return self._envs[range(self.num_envs)[index] // len(self._names)].render()

    def reset(self, seed: int | None = None) -> Tree:
        """Begin the next episode of every world, from episode 0 if `seed` is given. Returns the observation."""
        if seed is not None:
            self._seeds.restart(seed)
        return self._begin([self._seeds.advance(world) for world in range(self.worlds)])

    def reset_to(self, episode_seeds: Tensor) -> Tree:
        """Begin the episodes with these seeds (N,), for a replay. Later episodes are seeded as usual.

        Raises ValueError if the rows of a world have different seeds.
        """
        check_rows_of("reset_to", episode_seeds, self.num_envs, torch.int64)
        seed_WA = episode_seeds.view(self.worlds, -1)
        if not torch.equal(seed_WA, seed_WA[:, :1].expand_as(seed_WA)):
            raise ValueError(f"reset_to: expected one seed for all rows of a world, got {episode_seeds}")
        return self._begin(self._seeds.override(seed_WA[:, 0]))

    def apply_action(self, action: Tree) -> TimeStep:
        """Step every world with actions `(N, *A)`.

        Raises RuntimeError before the first reset, and EnvironmentContractError for an action or a result that does not
        fit its space. Exceptions of an environment get a note with the world, the episode seed and the step.
        """
        if self._observation is None:
            raise RuntimeError(f"{self._name}: call reset() before apply_action()")
        if not self._checked:
            check_action(action, self.num_envs, self.single_action_space)
            self._checked = True
        actions, agents = self._actions.split(action, self.num_envs), len(self._names)
        valid = [*self._alive]
        results = [self._step(world, actions[world * agents : (world + 1) * agents]) for world in range(self.worlds)]
        self._history.append(action, range(self.num_envs))
        rewards, terminated, truncated = ([value for result in results for value in result[part]] for part in range(3))
        final_observation = observation = self._observations.stack(self._rows)
        over = [w for w in range(self.worlds) if not any(self._alive[w * agents : (w + 1) * agents])]
        if over:
            final = [*self._rows]
            for world in over:
                self._begin_world(world, self._seeds.advance(world))
            observation = self._observations.stack(self._rows)
            for row in range(self.num_envs):
                if not valid[row]:  # no episode ends in this row
                    final[row] = self._rows[row]
            final_observation = self._observations.stack(final)
        self._observation = observation
        flags_3N = torch.tensor([terminated, truncated, valid], dtype=torch.bool, device="cpu")
        reward_N = torch.from_numpy(column("reward", rewards, _FLOAT))
        return TimeStep(observation, reward_N, flags_3N[0], flags_3N[1], final_observation, flags_3N[2], {})

    def reseed(self, seed: int) -> None:
        """Set the random seed. Raises RuntimeError after the first reset."""
        self._seeds.reseed(seed)

    def close(self) -> None:
        """Close every environment. A second call does nothing."""
        self._observation = None
        while self._envs:
            self._envs.pop().close()

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
            self._begin_world(world, self._seeds.of(world))
            taken = [self._actions.split(actions[row], steps[row]) for row in rows]
            for together in zip(*taken, strict=True):
                self._step(world, together)
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

    def _begin(self, seeds: Sequence[int]) -> Tree:
        for world, seed in enumerate(seeds):
            self._begin_world(world, seed)
        self._observation = self._observations.stack(self._rows)
        return self._observation

    def _begin_world(self, world: int, seed: int) -> None:
        first = world * len(self._names)
        observations, _ = self._noted(world, self._envs[world].reset, seed=seed)
        for agent, name in enumerate(self._names):
            row = first + agent
            self._history.clear(row)
            self._alive[row] = name in observations
            self._rows[row] = self._row(agent, observations.get(name))

    def _step(self, world: int, actions: Sequence[Any]) -> tuple[list[float], list[bool], list[bool]]:
        """Step one world. Returns rewards, terminated and truncated of its agents."""
        environment, first = self._envs[world], world * len(self._names)
        chosen = {
            name: _of_agent(action, space)
            for agent, (name, action, space) in enumerate(zip(self._names, actions, self._action_spaces, strict=True))
            if self._alive[first + agent]
        }
        observations, rewards, terminated, truncated, _ = self._noted(world, environment.step, chosen)
        reward_A = [0.0] * len(self._names)
        terminated_A, truncated_A = ([False] * len(self._names) for _ in range(2))
        for agent, name in enumerate(self._names):
            if self._alive[first + agent]:
                reward_A[agent] = rewards[name]
                terminated_A[agent], truncated_A[agent] = bool(terminated[name]), bool(truncated[name])
                self._alive[first + agent] = not (terminated_A[agent] or truncated_A[agent])
                self._rows[first + agent] = self._row(agent, observations[name])
        return reward_A, terminated_A, truncated_A

    def _noted(self, world: int, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except Exception as error:  # re-raised with a note
            step = self._history.steps(world * len(self._names))
            seed = self._seeds.of(world)
            error.add_note(f"in world {world} of {self._name}, episode seed {seed}, step {step}")
            raise

    def _row(self, agent: int, observation: Any) -> Any:
        """Return a copy of the observation of an agent in the space of a row. Without an observation, it is zeros."""
        if observation is None:
            observation = _zeros(self._observation_spaces[agent])
        if isinstance(observation, Mapping):
            return {key: np.array(value) for key, value in observation.items()}
        value = np.array(observation)
        if value.ndim != 1 or value.shape == self.single_observation_space.shape:
            return value
        row = np.zeros(self.single_observation_space.shape or (), self.single_observation_space.dtype)
        row[: len(value)] = value
        if self.agent_id:
            row[len(row) - len(self._names) + agent] = 1.0
        return row


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


def _common(name: str, what: str, all_spaces: Sequence[spaces.Space[Any]]) -> spaces.Space[Any]:
    """Return a space that contains the values of all spaces. Raises TypeError if there is none."""
    first = all_spaces[0]
    if all(space == first for space in all_spaces):
        return first
    if all(isinstance(space, spaces.Discrete) and space.start == 0 for space in all_spaces):
        return max(all_spaces, key=lambda space: space.n)  # type: ignore[attr-defined]  # they are Discrete
    if all(isinstance(space, spaces.Box) and space.shape and len(space.shape) == 1 for space in all_spaces):
        boxes: Any = all_spaces
        size = max(box.shape[0] for box in boxes)
        low, high = (
            functools.reduce(smaller, [np.pad(bound, (0, size - len(bound))) for bound in bounds])
            for smaller, bounds in ((np.minimum, [box.low for box in boxes]), (np.maximum, [box.high for box in boxes]))
        )
        return spaces.Box(low, high, dtype=np.result_type(*[box.dtype for box in boxes]).type)
    raise TypeError(
        f"{name}: the {what} spaces of the agents differ: {', '.join(map(str, all_spaces))}; spaces of different sizes "
        "must all be Discrete or Box vectors"
    )


def _with_id(name: str, space: spaces.Space[Any], agents: int) -> spaces.Box:
    """Return the space of vectors with an appended one-hot vector. Raises TypeError for other spaces."""
    if not isinstance(space, spaces.Box) or len(space.shape) != 1 or space.dtype.kind != "f":
        raise TypeError(f"{name}: agent_id=True needs observations that are vectors of floats, got {space}")
    low, high = np.append(space.low, np.zeros(agents)), np.append(space.high, np.ones(agents))
    return spaces.Box(low.astype(space.dtype), high.astype(space.dtype), dtype=space.dtype.type)


def _of_agent(action: Any, space: spaces.Space[Any]) -> Any:
    """Return the action of a row as an action of its agent."""
    if isinstance(space, spaces.Discrete):
        return min(action, int(space.start + space.n) - 1)
    return action[: space.shape[0]] if isinstance(space, spaces.Box) and len(space.shape) == 1 else action


def _zeros(space: spaces.Space[Any]) -> Any:
    if isinstance(space, spaces.Dict):
        return {key: _zeros(part) for key, part in space.items()}
    return np.zeros(space.shape or (), space.dtype)
