"""Conformance tests: every adapter and autoreset mode gives the transitions of a plain loop."""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import cloudpickle
import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import batch_space

from rein.envs.gymnasium import GymnasiumEnvironment, GymnasiumVectorEnvironment
from rein.episodes import EpisodeStatistics
from rein.replay.rollout import RowBuffer
from rein.types import TimeStep

N, ACTIONS = 3, 5
NEXT_STEP, SAME_STEP, DISABLED = AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP, AutoresetMode.DISABLED
ZEROS = torch.zeros(N, dtype=torch.int64)

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # a worker process cannot import this file


class Uneven(gymnasium.Env[Any, Any]):
    """Deterministic episodes of 1 to 7 steps that are terminated, truncated or both."""

    observation_space = spaces.Box(-1.0, 999.0, (4,), np.float64)
    action_space = spaces.Discrete(ACTIONS)

    def __init__(self, index: int, reuse: bool = False) -> None:
        self.index, self.reuse = index, reuse
        self.episode, self.ended = -1, True
        self.buffer = np.zeros(4)

    def observe(self, action: int) -> Any:
        """Return the observation. With `reuse` the next call overwrites the array."""
        self.buffer[:] = self.index, self.episode, self.steps, action
        return self.buffer if self.reuse else self.buffer.copy()

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.episode += 1
        self.steps, self.ended = 0, False
        self.length = 1 + (3 * self.index + 2 * self.episode) % 7
        return self.observe(-1), {"steps": -5}

    def step(self, action: Any) -> Any:
        assert not self.ended, "stepped after its end"
        self.steps += 1
        self.ended = self.steps == self.length
        way = (self.index + self.episode) % 3  # terminated, truncated, both
        ends = (self.ended and way != 1, self.ended and way != 0)
        return self.observe(int(action)), float(10 * action - self.steps), *ends, {"steps": self.steps}


class AleLike(VectorEnv[Any, Any, Any]):
    """Vector environment like those of ale-py: int32 rewards, one array of final observations, reused arrays."""

    def __init__(self, mode: AutoresetMode) -> None:
        self.num_envs, self.mode = N, mode
        self.metadata = {"autoreset_mode": mode}
        self.singles = [Uneven(index) for index in range(N)]
        self.single_observation_space, self.single_action_space = Uneven.observation_space, Uneven.action_space
        self.observation_space = batch_space(Uneven.observation_space, N)
        self.action_space = batch_space(Uneven.action_space, N)
        self.observation, self.final = np.zeros((N, 4)), np.zeros((N, 4))
        self.reward, self.ends = np.zeros(N, np.int32), np.zeros((2, N), bool)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        mask_N = (options or {}).pop("reset_mask", np.ones(N, bool))
        for index in mask_N.nonzero()[0]:
            self.reset_one(index)
        self.ends[:, mask_N] = False
        return self.observation, {}

    def reset_one(self, index: int) -> None:
        self.observation[index], _ = self.singles[index].reset()

    def step(self, actions: Any) -> Any:
        info, ended_N = {}, self.ends.any(0)
        for index, single in enumerate(self.singles):
            if self.mode is NEXT_STEP and ended_N[index]:
                self.reset_one(index)
                self.reward[index], self.ends[:, index] = 0, False
                continue
            self.observation[index], self.reward[index], *self.ends[:, index], _ = single.step(actions[index])
            if self.mode is SAME_STEP and single.ended:
                self.final[index] = self.observation[index]  # other rows are arbitrary
                info = {"final_obs": self.final}
                self.reset_one(index)
        return self.observation, self.reward, *self.ends, info


class Step(NamedTuple):
    """A transition of one environment as plain numbers."""

    observation: list[float]
    action: int
    reward: float
    terminated: bool
    truncated: bool
    next_observation: list[float]
    info: int


class Episode(NamedTuple):
    """A completed episode of one environment."""

    episode_return: float
    length: int
    terminated: bool
    truncated: bool
    final_observation: list[float]


def action_of(index: int, count: int) -> int:
    """Return the action of environment `index` in its `count`-th transition."""
    return (2 * index + count + count * count) % ACTIONS


def plain(index: int, steps: int) -> tuple[list[Step], list[Episode]]:
    """Return the transitions and episodes of a plain loop over one environment."""
    single, taken, episodes = Uneven(index), [], []
    observation, _ = single.reset()
    rewards = []
    for count in range(steps):
        action = action_of(index, count)
        seen, reward, terminated, truncated, info = single.step(action)
        taken.append(Step(observation.tolist(), action, reward, terminated, truncated, seen.tolist(), info["steps"]))
        rewards.append(reward)
        observation = seen
        if terminated or truncated:
            episodes.append(Episode(sum(rewards), len(rewards), terminated, truncated, seen.tolist()))
            observation, _ = single.reset()
            rewards = []
    return taken, episodes


def through(environment: Any, steps: int = 50) -> tuple[list[list[Step]], list[list[Episode]]]:
    """Return the valid transitions of each environment, and its episodes from `EpisodeStatistics`."""
    rows = RowBuffer()
    statistics = EpisodeStatistics(N, rows)
    taken: list[list[Step]] = [[] for _ in range(N)]
    observation = environment.reset()
    for _ in range(steps):
        action = torch.tensor([action_of(index, len(steps)) for index, steps in enumerate(taken)])
        time_step = environment.apply_action(action)
        collect(taken, observation, action, time_step)
        rows.append(
            {
                "reward": time_step.reward,
                "terminated": time_step.terminated,
                "truncated": time_step.truncated,
                "valid": time_step.valid,
                "next_observation": time_step.final_observation,
                "seed": environment.episode_seeds,
            }
        )
        observation = time_step.observation
    ended: list[list[Episode]] = [[] for _ in range(N)]
    table = statistics.episodes()
    assert (table.last_step - table.first_step + 1 == table.length).all()
    for row, index in enumerate(table.environment.tolist()):
        columns = (getattr(table, field)[row].tolist() for field in Episode._fields)
        ended[index].append(Episode(*columns))
    return taken, ended


def collect(taken: list[list[Step]], observation: torch.Tensor, action: torch.Tensor, time_step: TimeStep) -> None:
    info_N = time_step.info.get("steps", ZEROS).tolist()
    for index in time_step.valid.nonzero().flatten().tolist():
        flags = (bool(time_step.terminated[index]), bool(time_step.truncated[index]))
        seen = time_step.final_observation[index].tolist()
        reward = float(time_step.reward[index])
        step = Step(observation[index].tolist(), int(action[index]), reward, *flags, seen, info_N[index])
        taken[index].append(step)


def adapter(reuse: bool = False) -> GymnasiumEnvironment:
    index = itertools.count()
    return GymnasiumEnvironment(lambda: Uneven(next(index), reuse), N, 0, info={"steps": 0})


def sync(mode: AutoresetMode, reuse: bool = False, **options: Any) -> GymnasiumVectorEnvironment:
    singles = [functools.partial(Uneven, index, reuse) for index in range(N)]
    return GymnasiumVectorEnvironment(SyncVectorEnv(singles, autoreset_mode=mode, **options), info={"steps": 0})


def workers(mode: AutoresetMode) -> GymnasiumVectorEnvironment:
    singles = [functools.partial(Uneven, index) for index in range(N)]
    source = AsyncVectorEnv(singles, autoreset_mode=mode, context="spawn")
    return GymnasiumVectorEnvironment(source, info={"steps": 0})


SOURCES: dict[str, Callable[[], Any]] = {
    "adapter": adapter,
    "adapter, arrays reused": lambda: adapter(reuse=True),
}
for mode in AutoresetMode:
    SOURCES |= {
        f"sync, {mode.name}": functools.partial(sync, mode),
        f"sync, {mode.name}, arrays reused": functools.partial(sync, mode, reuse=True, copy=False),
        f"async, {mode.name}": functools.partial(workers, mode),
        f"like ale-py, {mode.name}": lambda mode=mode: GymnasiumVectorEnvironment(AleLike(mode), info={"steps": 0}),
    }


@pytest.mark.parametrize("source", SOURCES)
def test_every_reset_mode_matches_a_plain_loop(source: str) -> None:
    environment = SOURCES[source]()
    taken, ended = through(environment)
    environment.close()
    for index in range(N):
        expected, episodes = plain(index, len(taken[index]))
        if "ale-py" in source:  # has no infos
            expected = [step._replace(info=0) for step in expected]
        assert taken[index] == expected
        assert ended[index] == episodes
        assert len(episodes) > 8
        assert len({(episode.terminated, episode.truncated) for episode in episodes}) == 3
        resets = 50 - len(taken[index])  # invalid rows
        assert resets in ((len(episodes) - 1, len(episodes)) if "NEXT_STEP" in source else (0,))


@pytest.mark.parametrize("source", [source for source in SOURCES if "async" not in source])
def test_full_reset_within_episodes_begins_new_episodes(source: str) -> None:
    environment = SOURCES[source]()
    environment.reset()
    for _ in range(20):  # until environment 0 ends
        time_step = environment.apply_action(ZEROS)
        if time_step.terminated[0] | time_step.truncated[0]:
            break
    observation = environment.reset()
    time_step = environment.apply_action(ZEROS)
    environment.close()
    assert (observation[:, 2] == 0).all()
    assert time_step.valid.all()
    assert (time_step.final_observation[:, 2] == 1).all()
    assert torch.equal(time_step.final_observation[:, 1], observation[:, 1])
