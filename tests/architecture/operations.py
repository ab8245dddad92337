"""Count the operations of programs: `python tests/architecture/operations.py [--inductor]` prints a table.

Counts the operations per environment step and per optimizer step on a simulated device, without views, and exits with
status 1 if one is above its limit. Each operation is one kernel or more of a GPU, unless Inductor joins them. With
`--inductor`, compiles acting and an environment step for the CPU and counts the kernels and the library calls.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "tests" / "training" / "programs_on_a_device.py"
STEPS, UPDATES = 8, {"PPO": 4, "A2C": 1}  # of a rollout in PROGRAM, and optimizer steps for it
LIMITS = {  # per environment step, and per optimizer step with its share of the advantages
    "PPO, CartPole": (57, 124),
    "A2C, CartPole": (57, 168),
}


def counts(case: str, operations: Mapping[str, Mapping[str, int]]) -> tuple[float, float]:
    """Return the operations per environment step and per optimizer step of a case of PROGRAM."""
    rollout, update = (sum(operations[name].values()) for name in ("_computed", "_learned"))
    return rollout / STEPS, update / UPDATES[case.split(",", maxsplit=1)[0]]


def inductor() -> str:
    """Return the kernels and the library calls of acting and one environment step, compiled for the CPU."""
    import torch
    from torch._inductor import metrics
    from torch._inductor.utils import run_and_get_code

    import rein
    from rein.accelerate.compiled import lowered

    environment = rein.envs.CartPole(2048, seed=0)
    agent: Any = rein.PPO(environment, seed=0)
    observation, noise = environment.reset(), torch.rand(environment.num_envs)
    _, start_PQ = environment.cover(1)

    def step(tensors: Any, start_PQ: torch.Tensor, observation: torch.Tensor, noise: torch.Tensor) -> Any:
        action, extras = agent.choose(observation, noise)
        tensors, time_step = environment.advance(tensors, start_PQ, action)
        return tensors, extras, [x for x in time_step if isinstance(x, torch.Tensor)]

    metrics.reset()
    inputs = environment.tensors(), start_PQ, observation, noise
    _, code = run_and_get_code(lambda: lowered(step, inputs)(*inputs))
    calls = sum(text.count("extern_kernels.") for text in code)
    return (
        f"Inductor on the CPU: {metrics.generated_kernel_count} kernels and {calls} library calls per environment step"
    )


def main() -> int:
    """Print the table. Returns the exit status."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(PROGRAM), *LIMITS]
    done = subprocess.run(command, env=environment, cwd=PROGRAM.parent, capture_output=True, text=True, check=True)
    report, exceeded = json.loads(done.stdout.splitlines()[-1]), False
    for case, limits in LIMITS.items():
        per_step, per_update = counts(case, report[case]["operations"])
        print(f"{case}: {per_step:.1f} per environment step, {per_update:.1f} per optimizer step; limits {limits}")
        exceeded |= per_step > limits[0] or per_update > limits[1]
    if "--inductor" in sys.argv[1:]:
        print(inductor())
    return int(exceeded)


if __name__ == "__main__":
    sys.exit(main())
