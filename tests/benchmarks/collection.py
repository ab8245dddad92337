"""Collection from environments whose steps take different times: lock-step, first come and asynchronous.

    python tests/benchmarks/collection.py                # all of the following
    python tests/benchmarks/collection.py first-come     # 8 environments with exponential step times of mean 20 ms
    python tests/benchmarks/collection.py asynchronous   # SAC, and a step that sleeps as long as an update takes
    python tests/benchmarks/collection.py ray            # time that Ray actors add to steps of 20 ms
    python tests/benchmarks/collection.py pendulum       # final returns of SAC on Pendulum-v1
    python tests/benchmarks/collection.py cartpole       # env steps of PPO until CartPole-v1 is solved

The first three measure wall time. Environments sleep, so that other load matters little. The last two compare the
collection in the loop, by a thread and, if Ray is installed, by Ray actors.
"""

from __future__ import annotations

import functools
import importlib.util
import statistics
import sys
import time
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from sizes import size

import rein

MEAN = size(0.02, 0.001)  # seconds per step
ROUNDS, ITERATIONS, ENV_STEPS = size(3, 1), size(128, 16), size(2048, 128)
UPDATES, STARTS, BATCH = size(200, 2), size(256, 16), size(256, 16)  # of `asynchronous`
LEARNING_STEPS, RANDOM_STEPS = size(20_000, 80), size(1_000, 40)  # of `pendulum`
CARTPOLE_STEPS, CARTPOLE_EPOCHS = size(500_000, 8), size(10, 1)


class Sleeping(gymnasium.Env[Any, Any]):
    """Environment whose steps sleep: exponentially distributed times with a mean, or a fixed time."""

    def __init__(self, seconds: float, exponential: bool) -> None:
        self.observation_space = spaces.Box(-1.0, 1.0, (3,), np.float32)
        self.action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)
        self._seconds, self._exponential = seconds, exponential

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return np.zeros(3, np.float32), {}

    def step(self, action: Any) -> Any:
        time.sleep(self.np_random.exponential(self._seconds) if self._exponential else self._seconds)
        return np.zeros(3, np.float32), 0.0, False, False, {}


def rate(agent: Any, env: Any, collection: Any, env_steps: int) -> float:
    """Return env steps per second of wall time."""
    loop = rein.training_loop(agent, env, iterations=ITERATIONS, collection=collection)
    loop.run(epochs=1, iterations=8)  # start of threads and first use
    begun, before = time.perf_counter(), agent.env_steps
    loop.run(epochs=env_steps // (ITERATIONS * env.num_envs) + loop.state.epoch)
    return (agent.env_steps - before) / (time.perf_counter() - begun)


def first_come() -> None:
    """Print rates of PPO and of SAC that does not learn yet."""
    ceiling = 8 / MEAN
    cases: dict[str, Any] = {
        "PPO, rollouts of 128": functools.partial(rein.PPO, rollout_steps=128),
        "SAC before it learns": functools.partial(rein.SAC, learning_starts=10**9),
    }
    for name, build in cases.items():
        rates: dict[str, list[float]] = {"lock-step": [], "first come": []}
        for _ in range(ROUNDS):
            for kind, collection in (("lock-step", None), ("first come", rein.FirstCome())):
                env = rein.make(functools.partial(Sleeping, MEAN, True), 8, seed=0, workers=8, mode="threads")
                rates[kind].append(rate(build(env), env, collection, ENV_STEPS))
                env.close()
        slow, fast = (statistics.median(values) for values in rates.values())
        print(
            f"{name}: {slow:.0f} and {fast:.0f} env steps/s, ratio {fast / slow:.2f}, {fast / ceiling:.2f} of ceiling"
        )


def asynchronous() -> None:
    """Print rates of SAC with one environment whose step takes as long as an update."""
    torch.set_num_threads(1)
    build = functools.partial(rein.SAC, learning_starts=STARTS, batch_size=BATCH)
    env = rein.make(functools.partial(Sleeping, 0.0, False), 1, seed=0, workers=1, mode="threads")
    agent = build(env)
    rein.train(agent, env, env_steps=2 * STARTS)
    begun = time.perf_counter()
    agent.learn(UPDATES)
    update = (time.perf_counter() - begun) / UPDATES
    rates: dict[str, list[float]] = {"synchronous": [], "asynchronous": []}
    for _ in range(ROUNDS):
        for kind, collection in (("synchronous", None), ("asynchronous", rein.Asynchronous())):
            env = rein.make(functools.partial(Sleeping, update, False), 1, seed=0, workers=1, mode="threads")
            agent = build(env, seed=0)
            rein.train(agent, env, env_steps=2 * STARTS)
            rates[kind].append(rate(agent, env, collection, ENV_STEPS // 2))
            env.close()
    slow, fast = (statistics.median(values) for values in rates.values())
    print(f"SAC, updates of {1e3 * update:.1f} ms: {slow:.0f} and {fast:.0f} env steps/s, ratio {fast / slow:.2f}")


def ray() -> None:
    """Print times of 1,000 env steps of 8 environments with steps of 20 ms, in 8 threads and in 8 Ray actors."""
    if importlib.util.find_spec("ray") is None:
        print("Ray actors: ray is not installed")
        return
    torch.set_num_threads(1)
    ideal = 1_000 / 8 * MEAN
    cases: dict[str, Any] = {"threads": None}
    cases |= {f"actors, fragments of {n}": rein.RayActors(actors=8, fragment=n, num_cpus=0.2) for n in (8, 32)}
    for name, collection in cases.items():
        threads = {"workers": 8, "mode": "threads"} if collection is None else {}
        env = rein.make(functools.partial(Sleeping, MEAN, False), 8, seed=0, **threads)
        agent = rein.SAC(env, learning_starts=10**9)
        loop = rein.training_loop(agent, env, iterations=125, collection=collection)
        loop.run(epochs=1)  # start of threads or actors
        seconds = []
        for _ in range(ROUNDS):
            begun = time.perf_counter()
            loop.run(epochs=loop.state.epoch + 1)
            seconds.append(time.perf_counter() - begun)
        taken = statistics.median(seconds)
        print(f"{name}: {taken:.2f} s, {taken / ideal - 1:+.1%} of {ideal:.1f} s", flush=True)
        env.close()


def kinds() -> dict[str, Any]:
    """Return the collections that are compared."""
    found: dict[str, Any] = {"synchronous": None, "asynchronous": rein.Asynchronous(ahead=16)}
    if importlib.util.find_spec("ray"):
        found["Ray actors"] = rein.RayActors(actors=2, fragment=16, num_cpus=0.5)
    return found


def pendulum() -> None:
    """Print returns of SAC on Pendulum-v1 after 20,000 env steps, for five seeds."""
    torch.set_num_threads(1)
    for kind, collection in kinds().items():
        returns = []
        for seed in range(size(5, 1)):
            env = rein.make("Pendulum-v1", 4, seed=seed)
            agent = rein.SAC(env, learning_starts=RANDOM_STEPS, hidden=(64, 64), update_to_data=0.5, seed=seed)
            rein.train(agent, env, env_steps=LEARNING_STEPS, collection=collection)
            env.close()
            test_env = rein.make("Pendulum-v1", 20, seed=100)
            returns.append(rein.evaluate(agent, test_env, episodes=20).mean_return)
        print(f"{kind}: {', '.join(f'{value:.0f}' for value in returns)}", flush=True)


def cartpole() -> None:
    """Print env steps of PPO until 20 episodes of CartPole-v1 have a mean return of 475, for three seeds."""
    torch.set_num_threads(1)
    for kind, collection in kinds().items():
        needed = []
        for seed in range(size(3, 1)):
            env, test_env = rein.make("CartPole-v1", 8, seed=seed), rein.make("CartPole-v1", 20, seed=100)
            agent = rein.PPO(env, seed=seed, rollout_steps=128, learning_rate=1e-3)
            loop = rein.training_loop(agent, env, iterations=128, collection=collection)
            score = 0.0
            while score < 475.0 and agent.env_steps < CARTPOLE_STEPS:
                loop.run(epochs=loop.state.epoch + CARTPOLE_EPOCHS)
                score = rein.evaluate(agent, test_env, episodes=20).mean_return
            needed.append(f"{agent.env_steps} ({score:.0f})")
            env.close()
        print(f"{kind}: {', '.join(needed)}", flush=True)


if __name__ == "__main__":
    parts = {"first-come": first_come, "asynchronous": asynchronous, "ray": ray}
    parts |= {"pendulum": pendulum, "cartpole": cartpole}
    for name in sys.argv[1:] or parts:
        parts[name]()
