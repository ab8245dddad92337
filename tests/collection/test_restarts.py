"""Tests of workers that fail and are restarted during training and evaluation."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

import rein


class Fragile(gymnasium.Env[Any, Any]):
    """Counts its steps in the observation, rewards 1, ends after 12 steps, and raises at some of them."""

    def __init__(self, probability: float) -> None:
        self.observation_space = spaces.Box(0.0, 100.0, (1,), np.float32)
        self.action_space = spaces.Discrete(2)
        self._probability = probability

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._steps = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        if self.np_random.random() < self._probability:
            raise RuntimeError("the motor is hot")
        self._steps += 1
        return np.full(1, self._steps, np.float32), 1.0, self._steps == 12, False, {}


def fragile(probability: float = 0.02) -> Any:
    build = functools.partial(Fragile, probability)
    return rein.make(build, 4, seed=0, workers=2, mode="threads", on_failure="restart", max_restarts=1000)


COLLECTIONS = {"together": None, "first come": rein.FirstCome(), "asynchronous": rein.Asynchronous(ahead=4)}


@pytest.mark.default_cases("A2C-together", "A2C-first come", "A2C-asynchronous")
@pytest.mark.parametrize("collection", COLLECTIONS)
@pytest.mark.parametrize("kind", [rein.A2C, functools.partial(rein.DQN, learning_starts=50, batch_size=8)])
def test_lost_episodes_are_neither_counted_nor_joined_with_others(kind: Any, collection: str, tmp_path: Path) -> None:
    env = fragile()
    agent = kind(env, hidden=(8,), seed=0)
    rein.train(agent, env, tmp_path / "run", env_steps=1024, iterations=32, collection=COLLECTIONS[collection])
    env.close()
    assert env.restarts > 3
    run = rein.open_run(tmp_path / "run")
    episodes = [run.episode(number) for number in run.episodes["id"]]
    assert len(episodes) > 20
    for episode in episodes:
        assert episode.length == episode.episode_return == 12
        assert episode.fields["observation"].flatten().tolist() == list(range(12))


def test_value_before_a_lost_step_is_that_of_the_last_observation() -> None:
    env = fragile(0.3)
    agent = rein.A2C(env, hidden=(8,), rollout_steps=16, seed=0)
    loop = rein.training_loop(agent, env, iterations=16)

    @loop.observation_recorded
    def check(state: Any) -> None:
        transition = state.step_state.transition
        lost_N = transition.truncated & ~transition.valid
        assert torch.equal(transition.observation[lost_N], transition.next_observation[lost_N])

    loop.run(epochs=4)
    env.close()
    assert env.restarts > 3


def test_evaluation_plays_other_episodes_instead_of_lost_ones() -> None:
    env = fragile()
    agent = rein.A2C(env, hidden=(8,), seed=0)
    result = rein.evaluate(agent, env, episodes=40)
    env.close()
    assert env.restarts > 0
    assert set(result.episode_return.tolist()) == set(result.episode_length.tolist()) == {12}
    assert len({*result.seed.tolist()}) == 40
