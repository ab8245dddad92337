"""Measure populations: `python tests/benchmarks/population.py [epochs | sweep | memory | purejaxrl]`, by default all.

epochs: 16 learners in one process on one thread, in turns with a single run. Prints the CPU milliseconds of an epoch of
64 steps for all learners, and their ratio, for PPO with 128 CartPoles per learner and two layers of 32 and of 64, and
for SAC with one Pendulum per learner, one update per step and two layers of 64.

sweep: 64 learning rates of the recipe cartpole, 100,000 env steps each, as one run of `rein train` with 64 learners and
as 64 runs. Prints the CPU seconds of the processes on one thread, and those of the loops without start and imports.
Single runs are measured for five of the rates, and their mean is multiplied by 64.

memory: resident MiB of a process with 1, 4, 16 and 64 of the PPO learners with two layers of 64 (Linux only).

purejaxrl: 16 of these learners, and those of PureJaxRL under `jax.vmap` as one compiled program. Both are processes on
one core that take turns. PureJaxRL is included with `--purejaxrl` and JAX, as described in `ppo.py`.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measuring import memory
from ppo import line, measure, table
from sizes import size

import rein
from rein.ops.trees import leaves
from rein.recipes.cartpole_ppo import cartpole

LEARNERS, ENVS, STEPS, ROUNDS = size(16, 2), size(128, 8), size(64, 16), size(7, 1)
OPTIONS: dict[str, Any] = {"rollout_steps": STEPS, "learning_rate": 6e-3, "update_epochs": 2, "minibatches": 16}
RATES, SAMPLED = np.geomspace(1e-4, 1e-2, size(64, 2)), size((0, 16, 32, 48, 63), (0,))
ENV_STEPS, IN_MEMORY = size(100_000, 128), size((1, 4, 16, 64), (1, 2))


def loop_of(agent: Any, env: Any) -> rein.Loop:
    loop = rein.training_loop(agent, env, iterations=STEPS)
    loop.run(epochs=1)  # first use
    return loop


def milliseconds(loop: rein.Loop, epochs: int) -> float:
    """Return the CPU time of an epoch."""
    begun = time.process_time()
    loop.run(epochs=loop.state.epoch + epochs)
    return (time.process_time() - begun) / epochs * 1e3


def compare(name: str, kind: Any, environment: Any, envs: int, epochs: int, **options: Any) -> None:
    """Print the CPU times of `LEARNERS` learners as a population and as single runs."""
    env = environment(LEARNERS * envs, seed=0)
    together = loop_of(rein.Population(kind, env, learners=LEARNERS, seed=0, **options), env)
    env = environment(envs, seed=0)
    single = loop_of(kind(env, seed=0, **options), env)
    pairs = [(milliseconds(together, 2), LEARNERS * milliseconds(single, epochs)) for _ in range(ROUNDS)]
    ours, theirs = (statistics.median(times) for times in zip(*pairs, strict=True))
    ratio = statistics.median(b / a for a, b in pairs)
    print(f"{name}: population {ours:.0f} ms, single runs {theirs:.0f} ms, ratio {ratio:.2f}")


def seconds_of_process(*options: str) -> float:
    """Return the CPU time of `rein train cartpole` with these options."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["train", "cartpole", "--env-steps", str(ENV_STEPS), "--no-stop-when-solved", "--quiet", *options]
        command = [sys.executable, "-m", "rein", *words, "--run", f"{folder}/run"]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def seconds_of_loop(**options: Any) -> float:
    """Return the CPU time of a loop of the recipe cartpole, without its first epoch."""
    with tempfile.TemporaryDirectory() as folder:
        store = rein.HDF5Store(f"{folder}/run")
        loop = cartpole(store, stop_when_solved=False, **options)
        loop.run(epochs=1)
        begun = time.process_time()
        loop.run(epochs=1 + round(ENV_STEPS / (ENVS * STEPS)))
        return time.process_time() - begun


def compare_sweeps() -> None:
    """Compare a run of 64 learners with 64 single runs."""
    rates = [float(RATES[number]) for number in SAMPLED]
    single = [seconds_of_process("--learning-rate", str(rate)) for rate in rates]
    together = seconds_of_process("--learners", str(len(RATES)), "--param", "learning_rate=log:1e-4..1e-2")
    report("processes", together, single)
    single = [seconds_of_loop(learning_rate=rate) for rate in rates]
    report("loops", seconds_of_loop(learners=len(RATES), learning_rate=RATES.tolist()), single)


def report(what: str, together: float, single: list[float]) -> None:
    """Print CPU times and their ratio."""
    every, spread = len(RATES) * statistics.mean(single), f"{min(single):.2f} to {max(single):.2f}"
    times = f"{len(RATES)} learners {together:.1f} s, {len(RATES)} single runs {every:.1f} s ({spread} s each)"
    print(f"{what}: {times}, ratio {together / every:.3f}", flush=True)


def compare_epochs() -> None:
    """Compare an epoch of all learners with epochs of single agents."""
    for units in (32, 64):
        compare(f"PPO, two layers of {units}", rein.PPO, rein.envs.CartPole, ENVS, 8, hidden=(units, units), **OPTIONS)
    options: dict[str, Any] = {"hidden": (64, 64), "learning_starts": STEPS // 2}
    compare("SAC, two layers of 64", rein.SAC, rein.envs.Pendulum, 1, 4, **options)


def measure_memory() -> None:
    """Measure each number of learners in its own process."""
    print("MiB of a process with two layers of 64; `per learner` is the growth of the peak from one learner")
    line("learners", "state per learner", "built", "after 5 epochs", "after 10 epochs", "peak", "per learner")
    peak = 0.0
    for learners in IN_MEMORY:
        command = [sys.executable, __file__, "--learners", str(learners)]
        state, *found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        peak = peak or found[-1]
        grown = f"{(found[-1] - peak) / (learners - 1):.2f}" if learners > 1 else ""
        line(learners, f"{state / learners:.3f}", *(f"{number:.0f}" for number in found), grown)


def print_memory(learners: int) -> None:
    """Print the MiB of the state, and those of this process when built, after 5 and 10 epochs, and at its peak."""
    env = rein.envs.CartPole(learners * ENVS, seed=0)
    agent = rein.Population(rein.PPO, env, learners=learners, seed=0, hidden=(64, 64), **OPTIONS)
    loop, found = rein.training_loop(agent, env, iterations=STEPS), [memory()]
    for epochs in (5, 10):
        loop.run(epochs=epochs)
        found.append(memory())
    found.append(memory("VmHWM"))
    size = sum(x.numel() * x.element_size() for _, x in leaves(agent.state_dict()) if isinstance(x, torch.Tensor))
    print(json.dumps([size / 2**20, *found]))


def compare_with_purejaxrl(checkout: Path | None, repeats: int) -> None:
    """Compare env steps per CPU second with those of PureJaxRL."""
    shape = {"num_envs": ENVS, "rollout_steps": STEPS, "minibatches": 16, "update_epochs": 2, "learners": LEARNERS}
    specs: dict[str, Any] = {"population": ("population", shape, 1)}
    if checkout:
        specs["PureJaxRL"] = "purejaxrl", shape | {"checkout": str(checkout.resolve())}, 1
    print(f"{LEARNERS} learners with {ENVS} CartPoles x {STEPS} steps, ", end="")
    print(f"2 x 16 updates, two networks of 64 x 64; medians of {repeats} rounds")
    rows = measure(specs, repeats)
    rows.setdefault("PureJaxRL", "not installed: see --purejaxrl")
    table(rows, "population", "PureJaxRL")


def main() -> None:
    """Run the parts that the command line names, by default all."""
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description="Measure populations.")
    parser.add_argument("parts", nargs="*", help="epochs, sweep, memory, purejaxrl; all by default")
    parser.add_argument("--repeats", type=int, default=size(5, 1), help="number of rounds of `purejaxrl`")
    parser.add_argument("--purejaxrl", type=Path, help="a checkout of github.com/luchris429/purejaxrl")
    parser.add_argument("--learners", type=int, help="print the memory of this number of learners; used by `memory`")
    given = parser.parse_args()
    parts = {
        "epochs": compare_epochs,
        "sweep": compare_sweeps,
        "memory": measure_memory,
        "purejaxrl": lambda: compare_with_purejaxrl(given.purejaxrl, given.repeats),
    }
    if unknown := {*given.parts} - {*parts}:
        parser.error(f"unknown part {', '.join(sorted(unknown))}; choose from {', '.join(parts)}")
    if given.learners:
        print_memory(given.learners)
        return
    for name in given.parts or parts:
        parts[name]()


if __name__ == "__main__":
    main()
