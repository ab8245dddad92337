"""Measure the overhead of the adapters of tensor and JAX environments: `python tests/benchmarks/adapters.py`.

The first part steps a vector environment that does nothing, directly and through `TensorEnvironment`. The second part
steps brax's Ant in a Python loop over Brax's own vectorized and compiled step, with its automatic reset, and through
`JaxEnvironment`. It runs if brax is installed. Both parts alternate between the two, and print medians.

Shapes: N environments.
"""

from __future__ import annotations

import os

os.environ.update(OMP_NUM_THREADS="1", XLA_FLAGS="--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1")

import importlib.util
from typing import Any

import torch
from gymnasium import spaces
from measuring import Run, in_turns, verdict
from sizes import size

from rein.envs.jax import JaxEnvironment
from rein.envs.tensors import TensorEnvironment

REPEATS, STEPS = size(15, 2), size(2000, 20)
ANTS, ANT_STEPS = size(64, 2), size(20, 2)
OVERHEAD = 20.0  # target in microseconds
RATIO = 0.8  # target of the rate of env steps


class Nothing:
    """Vector environment that returns the same tensors in each step."""

    single_observation_space = spaces.Box(-1.0, 1.0, (48,))
    single_action_space = spaces.Box(-1.0, 1.0, (12,))
    device = "cpu"

    def __init__(self, num_envs: int) -> None:
        self.num_envs = num_envs
        self.observation, self.reward = torch.zeros(num_envs, 48), torch.zeros(num_envs)
        self.flags = torch.zeros(num_envs, dtype=torch.bool)
        self.info = {"final_obs": self.observation}

    def reset(self, seed: int | None = None, env_ids: torch.Tensor | None = None) -> Any:
        return self.observation, {}

    def step(self, action: torch.Tensor) -> Any:
        return self.observation, self.reward, self.flags, self.flags, self.info


def compare(runs: dict[str, Run], steps: int) -> dict[str, float]:
    """Return the median CPU seconds per vector step by name."""
    for run in runs.values():
        run(steps)
    return in_turns(runs, dict.fromkeys(runs, steps), REPEATS)


def tensors(num_envs: int, source: str) -> None:
    env = Nothing(num_envs)
    environment = TensorEnvironment(env, 0, final_observation=source)  # type: ignore[arg-type]
    environment.reset()
    action = torch.zeros(num_envs, 12)

    def direct(steps: int) -> None:
        for _ in range(steps):
            env.step(action)

    def adapted(steps: int) -> None:
        for _ in range(steps):
            environment.apply_action(action)

    found = compare({"direct": direct, "adapted": adapted}, STEPS)
    extra = 1e6 * (found["adapted"] - found["direct"])
    target = f"(target {OVERHEAD:.0f}) {verdict(extra <= OVERHEAD)}"
    print(f"  N = {num_envs:5}, final_observation={source!r:11} {extra:5.1f} us {target}")


def ant(num_envs: int, steps: int) -> None:
    import brax.envs
    import jax

    bare = brax.envs.create(
        "ant", backend="spring", batch_size=num_envs
    )  # resets to the first state of each environment
    step = jax.jit(bare.step)
    state = [jax.jit(bare.reset)(jax.random.PRNGKey(0))]
    random = jax.random.uniform(jax.random.PRNGKey(1), (64, num_envs, 8), minval=-1.0)
    environment = JaxEnvironment(brax.envs.create("ant", backend="spring", auto_reset=False), num_envs=num_envs, seed=0)
    environment.reset()
    actions = torch.from_dlpack(random)

    def loop(steps: int) -> None:
        for k in range(steps):
            state[0] = step(state[0], random[k % 64])
        jax.block_until_ready(state[0])

    def adapted(steps: int) -> None:
        for k in range(steps):
            environment.apply_action(actions[k % 64])

    found = compare({"loop": loop, "adapted": adapted}, steps)
    ratio = found["loop"] / found["adapted"]
    rates = ", ".join(f"{name} {num_envs / seconds:,.0f}" for name, seconds in found.items())
    target = f"(target {RATIO}) {verdict(ratio >= RATIO)}"
    print(f"  N = {num_envs:5}: {rates} env steps per CPU second, ratio {ratio:.2f} {target}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}\nTensorEnvironment, time added to a step that does nothing")
    for num_envs in (64, 1024):
        for source in ("info", "previous", "step"):
            tensors(num_envs, source)
    if importlib.util.find_spec("brax") is None:
        print("JaxEnvironment: brax is not installed")
    else:
        print("JaxEnvironment, brax's Ant on the CPU")
        ant(ANTS, ANT_STEPS)
