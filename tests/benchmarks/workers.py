"""Measure environments in workers: `python tests/benchmarks/workers.py`.

Each part alternates between the compared environments, and prints medians of the time of a vector step and their ratio.
The machine should be idle: a waiting process gets its core back late on a busy one.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"

import importlib.util
import statistics
import time
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv
from sizes import size

import rein
from rein.testing.environment_contract import random_actions

REPEATS, CHEETAHS = size(9, 1), size(16, 2)

Run = Callable[[int], Any]  # function of a number of vector steps


class Sleeps(gymnasium.Env[Any, Any]):
    """Environment whose step waits for 2 ms."""

    observation_space = spaces.Box(-1.0, 1.0, (4,))
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.zeros(4, np.float32), {}

    def step(self, action: Any) -> Any:
        time.sleep(2e-3)
        return np.zeros(4, np.float32), 0.0, False, False, {}


def run_of(environment: Any) -> Run:
    environment.reset()
    actions = random_actions(environment, 50)
    return lambda steps: [environment.apply_action(actions[step % 50]) for step in range(steps)]


def run_of_vector(environment: Any) -> Run:
    environment.reset(seed=0)
    actions = [environment.action_space.sample() for _ in range(50)]
    return lambda steps: [environment.step(actions[step % 50]) for step in range(steps)]


def compare(what: str, runs: dict[str, Run], steps: int, target: float) -> None:
    """Print the median microseconds of a vector step of both runs, and how much faster the second one is."""
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run(steps)
    for _ in range(REPEATS):
        for name, run in runs.items():
            began = time.perf_counter()
            run(steps)
            taken[name].append((time.perf_counter() - began) / steps * 1e6)
    first, second = (statistics.median(seconds) for seconds in taken.values())
    each = ", ".join(f"{name} {statistics.median(seconds):.0f} us" for name, seconds in taken.items())
    print(f"{what}: {each}; {first / second:.2f} times as fast (target {target})")


def main() -> None:
    """Run all comparisons."""
    vector = AsyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * 8)
    pool = rein.make("CartPole-v1", 8, 0, workers=2)
    runs = {"AsyncVectorEnv": run_of_vector(vector), "2 processes": run_of(pool)}
    compare("CartPole-v1, 8 environments", runs, size(300, 3), 3.0)
    vector.close()
    pool.close()
    if importlib.util.find_spec("mujoco") is None:
        print("HalfCheetah-v5: mujoco is not installed")
    else:
        one, pool = rein.make("HalfCheetah-v5", CHEETAHS, 0), rein.make("HalfCheetah-v5", CHEETAHS, 0, workers=2)
        runs = {"one process": run_of(one), "2 processes": run_of(pool)}
        compare(f"HalfCheetah-v5, {CHEETAHS} environments", runs, size(60, 2), 1.7)
        one.close()
        pool.close()
    one, pool = rein.make(Sleeps, 16, 0), rein.make(Sleeps, 16, 0, workers=4, mode="threads")
    compare("16 environments that wait 2 ms", {"one thread": run_of(one), "4 threads": run_of(pool)}, size(8, 2), 3.6)
    one.close()
    pool.close()


if __name__ == "__main__":
    main()
