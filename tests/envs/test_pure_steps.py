"""Pure functions of simulated environments and agents equal the methods that a loop calls, bit for bit."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import rein
from rein.envs import Acrobot, CartPole, Gridworld, MountainCar, Navigation, Pendulum
from rein.ops.trees import leaves

MAKE: dict[str, Any] = {
    "CartPole": functools.partial(CartPole, 6),
    "Pendulum": functools.partial(Pendulum, 6, max_episode_steps=5),
    "Acrobot": functools.partial(Acrobot, 6, max_episode_steps=7),
    "MountainCar": functools.partial(MountainCar, 6, max_episode_steps=7),
    "Gridworld": functools.partial(Gridworld, 6, [(1, 1), (2, 0)], max_episode_steps=9),
    "Navigation": functools.partial(Navigation, 3, 2, max_episode_steps=6),
    "agents that leave": functools.partial(Navigation, 3, 2, early_leave=True, max_episode_steps=9),
}


def assert_equal(one: Any, other: Any) -> None:
    pairs = list(zip(leaves(one), leaves(other), strict=True))
    assert pairs
    for (path, a), (_, b) in pairs:
        assert torch.equal(a, b), path


@pytest.mark.parametrize("name", MAKE)
def test_steps_as_pure_functions_equal_steps_of_the_loop(name: str) -> None:
    steps = 40
    environment, pure = MAKE[name](seed=0), MAKE[name](seed=0)
    agent, chooser = (rein.PPO(env, seed=0, hidden=(8,)) for env in (environment, pure))
    observation = environment.reset()
    seen = pure.reset()
    noise_like, _ = chooser.networks.policy(chooser.networks.preprocess(seen))
    for _ in range(2):
        seed_P, start_PQ = pure.cover(steps)
        tensors = pure.tensors()
        for _ in range(steps):
            action, extras = agent.select_action(observation)
            seeds = environment.episode_seeds
            with torch.no_grad():
                chosen = chooser.choose(seen, noise_like.noise(chooser.generator))
                assert torch.equal(pure.seeds_at(tensors[-1], seed_P), seeds)
                tensors, received = pure.advance(tensors, start_PQ, chosen[0])
            time_step = environment.apply_action(action)
            assert_equal((action, extras), chosen)
            assert_equal(time_step, received)
            observation, seen = time_step.observation, received.observation
        pure.set_tensors(tensors)
        assert_equal(environment.state_dict()["seeds"]["index"], pure.state_dict()["seeds"]["index"])
    action = agent.select_action(observation)[0]  # the ordinary methods continue from there
    assert_equal(environment.apply_action(action), pure.apply_action(action))


def test_bootstrap_values_without_a_selection_of_rows_are_equal() -> None:
    environment = CartPole(8, seed=0, max_episode_steps=5)
    agent = rein.A2C(environment, rollout_steps=16, seed=0)
    rein.training_loop(agent, environment).run(epochs=1, iterations=15)
    rollout = agent.rollout
    gathered = agent.next_values(rollout["value"])
    rollout.dense = True
    assert rollout.valid() is not None
    assert torch.allclose(agent.next_values(rollout["value"]), gathered, atol=1e-6)
