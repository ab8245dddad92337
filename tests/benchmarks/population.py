"""Compare a population with single runs: `python tests/benchmarks/population.py`.

16 PPO learners with 128 CartPoles each, in one process on one thread. Both take turns. Prints the CPU milliseconds of
an epoch of 64 steps for all learners, and their ratio, for two layers of 32 and of 64.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"

import statistics
import time
from typing import Any

import torch

import rein

LEARNERS, ENVS, STEPS, ROUNDS = 16, 128, 64, 7


def loop_of(agent: Any, env: Any) -> rein.Loop:
    loop = rein.training_loop(agent, env, iterations=STEPS)
    loop.run(epochs=1)  # first use
    return loop


def milliseconds(loop: rein.Loop, epochs: int) -> float:
    """Return the CPU time of an epoch."""
    begun = time.process_time()
    loop.run(epochs=loop.state.epoch + epochs)
    return (time.process_time() - begun) / epochs * 1e3


def main() -> None:
    """Run all comparisons."""
    torch.set_num_threads(1)
    for units in (32, 64):
        options: dict[str, Any] = {"hidden": (units, units), "rollout_steps": STEPS, "learning_rate": 6e-3}
        options |= {"update_epochs": 2, "minibatches": 16}
        env = rein.envs.CartPole(LEARNERS * ENVS, seed=0)
        together = loop_of(rein.Population(rein.PPO, env, learners=LEARNERS, seed=0, **options), env)
        env = rein.envs.CartPole(ENVS, seed=0)
        single = loop_of(rein.PPO(env, seed=0, **options), env)
        pairs = [(milliseconds(together, 2), LEARNERS * milliseconds(single, 8)) for _ in range(ROUNDS)]
        ours, theirs = (statistics.median(times) for times in zip(*pairs, strict=True))
        ratio = statistics.median(b / a for a, b in pairs)
        print(f"two layers of {units}: population {ours:.0f} ms, single runs {theirs:.0f} ms, ratio {ratio:.2f}")


if __name__ == "__main__":
    main()
