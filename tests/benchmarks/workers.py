"""Measure environments in workers: `python tests/benchmarks/workers.py`.

Each part alternates between the compared environments, and prints medians of the time of a vector step and their ratio.
The machine should be idle: a waiting process gets its core back late on a busy one.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"

import functools
import importlib.util
import time

import gymnasium
from collection import Sleeping
from gymnasium.vector import AsyncVectorEnv
from measuring import Run, in_turns, steps_of, steps_of_vector
from sizes import size

import rein

REPEATS, CHEETAHS = size(9, 1), size(16, 2)


def compare(what: str, runs: dict[str, Run], steps: int, target: float) -> None:
    """Print the median microseconds of a vector step of both runs, and how much faster the second one is."""
    for run in runs.values():
        run(steps)
    taken = in_turns(runs, dict.fromkeys(runs, steps), REPEATS, time.perf_counter)
    first, second = taken.values()
    each = ", ".join(f"{name} {1e6 * seconds:.0f} us" for name, seconds in taken.items())
    print(f"{what}: {each}; {first / second:.2f} times as fast (target {target})")


def main() -> None:
    """Run all comparisons."""
    vector = AsyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * 8)
    pool = rein.make("CartPole-v1", 8, 0, workers=2)
    runs = {"AsyncVectorEnv": steps_of_vector(vector), "2 processes": steps_of(pool)}
    compare("CartPole-v1, 8 environments", runs, size(300, 3), 3.0)
    vector.close()
    pool.close()
    if importlib.util.find_spec("mujoco") is None:
        print("HalfCheetah-v5: mujoco is not installed")
    else:
        one, pool = rein.make("HalfCheetah-v5", CHEETAHS, 0), rein.make("HalfCheetah-v5", CHEETAHS, 0, workers=2)
        runs = {"one process": steps_of(one), "2 processes": steps_of(pool)}
        compare(f"HalfCheetah-v5, {CHEETAHS} environments", runs, size(60, 2), 1.7)
        one.close()
        pool.close()
    sleeping = functools.partial(Sleeping, 2e-3, False)
    one, pool = rein.make(sleeping, 16, 0), rein.make(sleeping, 16, 0, workers=4, mode="threads")
    compare(
        "16 environments that wait 2 ms", {"one thread": steps_of(one), "4 threads": steps_of(pool)}, size(8, 2), 3.6
    )
    one.close()
    pool.close()


if __name__ == "__main__":
    main()
