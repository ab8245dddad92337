"""Measure the speed of environments and compare it with other libraries: `python tests/benchmarks/environments.py`.

Results are env steps per CPU second on one thread, medians of interleaved repeats. Load of the machine affects all rows
equally, so compare ratios. Actions are random and sampled in advance; seeds, autoreset and final observations are
enabled. gymnax is included if it is installed (`pip install gymnax==0.0.9`), compiled environments if there is a C++
compiler.

Shapes: N environments.
"""

from __future__ import annotations

import os

os.environ.update(OMP_NUM_THREADS="1", XLA_FLAGS="--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1")

import importlib.util
import shutil
from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
import torch
from measuring import Run, in_turns, seconds_of, steps_of, steps_of_vector, verdict
from sizes import size

from rein.envs.acrobot import Acrobot
from rein.envs.cartpole import CartPole
from rein.envs.gymnasium import GymnasiumEnvironment
from rein.envs.mountain_car import MountainCar, MountainCarContinuous
from rein.envs.pendulum import Pendulum

SIZES, LARGE = size((1, 8, 64, 1024, 8192), (8,)), size((1024, 8192), (8,))
REPEATS, SECONDS = size(9, 1), size(0.15, 0.001)  # of CPU time each
FEW = 64  # largest number of environments for SyncVectorEnv
TARGETS = {("eager", 1024): 0.6, ("compiled", 1024): 1.0, ("eager", 8192): 1.1}

COMPILER = shutil.which(os.environ.get("CXX", "g++"))
GYMNAX = importlib.util.find_spec("gymnax") is not None


def native(kind: Any, num_envs: int, **options: Any) -> Run:
    return steps_of(kind(num_envs, seed=0, **options))


def vector(num_envs: int, mode: str) -> Run:
    """Gymnasium's vector environment: CartPole in numpy ("vector_entry_point") or a loop over N ("sync")."""
    return steps_of_vector(gymnasium.make_vec("CartPole-v1", num_envs, vectorization_mode=mode))


def gymnax(num_envs: int) -> Run:
    """gymnax, with the whole rollout in one compiled scan."""
    import gymnax as library
    import jax

    environment, parameters = library.make("CartPole-v1")
    step = jax.vmap(environment.step, (0, 0, 0, None))

    def body(carry: Any, _: None) -> tuple[Any, Any]:
        key, state = carry
        key, draw, *keys = jax.random.split(key, 2 + num_envs)
        action = jax.random.randint(draw, (num_envs,), 0, 2)
        observation, state, reward, *_ = step(jax.numpy.stack(keys), state, action, parameters)
        return (key, state), (observation.sum(), reward.sum())

    rollout = jax.jit(lambda carry: jax.lax.scan(body, carry, None, 100))
    keys = jax.random.split(jax.random.key(0), num_envs)
    carry = [(jax.random.key(1), jax.vmap(environment.reset, (0, None))(keys, parameters)[1])]

    def run(steps: int) -> None:
        for _ in range(-(-steps // 100)):
            carry[0], sums = rollout(carry[0])
        jax.block_until_ready(sums)

    return run


def adapter() -> Run:
    return steps_of(GymnasiumEnvironment("CartPole-v1", 8, 0))


def rates(runs: Mapping[str, Run], num_envs: int) -> dict[str, float]:
    """Return env steps per CPU second by name."""
    seconds = in_turns(runs, {name: warmed_up(run) for name, run in runs.items()}, REPEATS)
    return {name: num_envs / each for name, each in seconds.items()}


def warmed_up(run: Run) -> int:
    """Warm up and compile, and return the number of steps, in hundreds, that take `SECONDS`."""
    run(200)
    return max(1, round(SECONDS / (100 * seconds_of(run, 100)))) * 100


def cartpole() -> None:
    print("CartPole-v1, million env steps per CPU second, and the ratio to Gymnasium's vector environment")
    row("N", "gym vector", "gym sync", "eager", "compiled", "gymnax")
    for num_envs in SIZES:
        runs = {"gym vector": vector(num_envs, "vector_entry_point"), "eager": native(CartPole, num_envs)}
        if num_envs <= FEW:
            runs["gym sync"] = vector(num_envs, "sync")
        if COMPILER:
            runs["compiled"] = native(CartPole, num_envs, compile=True)
        if GYMNAX:
            runs["gymnax"] = gymnax(num_envs)
        got = rates(runs, num_envs)
        cells = [shown(got, name, num_envs) for name in ("gym vector", "gym sync", "eager", "compiled", "gymnax")]
        row(num_envs, *cells)
    print()


def shown(got: Mapping[str, float], name: str, num_envs: int) -> str:
    if name not in got:
        return ""
    ratio, target = got[name] / got["gym vector"], TARGETS.get((name, num_envs), 0.0)
    verdict = "" if ratio >= target else " MISSED"
    return f"{got[name] / 1e6:.2f} {ratio:5.2f}x{verdict}"


def others() -> None:
    print("Other environments, million env steps per CPU second")
    row("", *(f"{how}, N = {num_envs}" for num_envs in LARGE for how in ("eager", "compiled")))
    compiler = size(COMPILER, None)  # compiling takes 7 s for each of these environments
    for kind in (Acrobot, MountainCar, MountainCarContinuous, Pendulum):
        cells = []
        for num_envs in LARGE:
            runs = {"eager": native(kind, num_envs)}
            if compiler:
                runs["compiled"] = native(kind, num_envs, compile=True)
            got = rates(runs, num_envs)
            cells += [f"{got[how] / 1e6:.2f}" if how in got else "" for how in ("eager", "compiled")]
        row(kind.__name__, *cells)
    print()


def of_gymnasium() -> None:
    got = rates({"bare": vector(8, "sync"), "adapter": adapter()}, 8)
    print("8 CartPole-v1 of Gymnasium in a loop, env steps per CPU second")
    print(f"  a bare loop over SyncVectorEnv {got['bare']:,.0f}, GymnasiumEnvironment {got['adapter']:,.0f}: ", end="")
    over = got["bare"] / got["adapter"] - 1.0
    print(f"{over:+.0%} of time (target +25%) {verdict(over <= 0.25)}")


def row(what: Any, *cells: Any) -> None:
    print(f"  {what!s:>22}" + "".join(f"{cell!s:>22}" for cell in cells))


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, gymnasium {gymnasium.__version__}, numpy {np.__version__}\n")
    cartpole()
    others()
    of_gymnasium()
