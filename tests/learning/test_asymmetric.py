"""A critic observation shortens training on the task of `examples/asymmetric.py`."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

import rein
from rein.envs.wrappers import ScaleReward

EXAMPLE = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "asymmetric.py"))
SEEDS = [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)]
GAMMA = 0.95


def steps_to_solve(
    kind: Any,
    seed: int,
    privileged: bool,
    *,
    num_envs: int,
    task: Any,
    solved: float,
    every: int,
    limit: int,
    **options: Any,
) -> int | None:
    """Train until the greedy policy reaches the return `solved`. Returns the env steps; None if `limit` is reached."""
    sensors = EXAMPLE["Sensors"](EXAMPLE["NoisyReach"](num_envs, seed=seed, **task), privileged)
    environment = ScaleReward(sensors, options.pop("scale", 1.0))
    agent = kind(environment, seed=seed, gamma=GAMMA, **options)
    loop = rein.training_loop(agent, environment)
    for epoch in range(1, limit // every + 1):
        loop.run(epochs=epoch, iterations=every // num_envs)
        if EXAMPLE["mean_return"](agent, **task) >= solved:
            return epoch * every
    return None


def sac(seed: int, privileged: bool, limit: int) -> int | None:
    networks = {"hidden": (64, 64), "learning_rate": 1e-3}
    replay = {"batch_size": 128, "learning_starts": 256, "update_to_data": 0.5}
    task = {"num_envs": 4, "task": {"noise": 1.0, "speed": 0.3}, "solved": -9.0, "every": 500}
    return steps_to_solve(rein.SAC, seed, privileged, limit=limit, **task, **networks, **replay)


def ppo(seed: int, privileged: bool, limit: int) -> int | None:
    options = {"learning_rate": 1e-3, "rollout_steps": 20, "update_epochs": 10, "value_coefficient": 2.0, "scale": 0.05}
    task = {"num_envs": 32, "task": {"noise": 0.5, "speed": 0.02}, "solved": -12.2, "every": 3200}
    return steps_to_solve(rein.PPO, seed, privileged, limit=limit, **task, **options)


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_sac_needs_fewer_steps_with_a_critic_observation(seed: int) -> None:
    steps = sac(seed, True, 4_000)
    assert steps is not None
    assert sac(seed, False, steps) is None


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_ppo_needs_fewer_steps_with_a_critic_observation(seed: int) -> None:
    steps = ppo(seed, True, 48_000)
    assert steps is not None
    assert ppo(seed, False, steps) is None
