"""Check and measure programs on a GPU: `python tests/benchmarks/gpu.py [equality sync throughput]`, by default all.

equality: PPO and A2C with programs and operation by operation, for 3 epochs and with a halt in the middle of a rollout.
Prints the largest difference of parameters.

sync: a run in which an operation within a replay that waits for the GPU raises an error.

throughput: env steps per wall second of PPO on native CartPoles, with two layers of 64, rollouts of 64 steps and 2
passes of 16 minibatches: operation by operation, as CUDA graphs, and as graphs with kernels of Inductor. Also prints
the seconds until all programs are captured, and the memory. PureJaxRL is included if `--purejaxrl` is a checkout of it
and JAX is installed, as described in `ppo.py`. Each row is a child process.

Takes five minutes. Prints one line without a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from ppo_peers import purejaxrl

import rein
from rein.accelerate import compiled

PARTS = "equality", "sync", "throughput"
MODES = "eager", "graphs", "graphs + Inductor"
NUM_ENVS, STEPS = (2048, 4096), 64
SHAPE: dict[str, Any] = {"rollout_steps": STEPS, "update_epochs": 2, "minibatches": 16}
WARM_UP, SECONDS = 6, 8.0  # epochs, after which all programs are captured, and time of a measurement
GOAL = 10.0  # million env steps per second


def loop_of(kind: Any, mode: str, num_envs: int, device: str = "cuda", **options: Any) -> rein.Loop:
    """Return a loop whose epochs are rollouts."""
    if mode == "graphs":  # without Inductor
        torch.compile = lambda function, **options: function  # type: ignore[assignment]
        compiled.FUSED.clear()
    environment = rein.envs.CartPole(num_envs, seed=0, device=device)
    agent = kind(environment, seed=0, device=device, compile=mode != "eager", **options)
    return rein.training_loop(agent, environment, epochs=None, iterations=agent.rollout_steps)


def parameters(kind: Any, mode: str, halt: bool, **options: Any) -> list[torch.Tensor]:
    """Return the parameters after the first rollouts, which are ordinary, and 3 rollouts that are replayed."""
    loop = loop_of(kind, mode, 256, rollout_steps=16, **options)
    if halt:

        @loop.iteration_completed(once=16 * (WARM_UP - 2) + 5)
        def stop(state: rein.State) -> None:
            state.halt_epoch()

    loop.run(epochs=WARM_UP + 3)
    return [parameter.detach().cpu() for parameter in loop.parts["agent"].networks.parameters()]


def equality(mode: str) -> dict[str, float]:
    """Return the largest difference of parameters to operation by operation."""
    cases: dict[str, Any] = {"PPO": (rein.PPO, {"minibatches": 4}), "A2C": (rein.A2C, {})}
    found = {}
    for name, (kind, options) in cases.items():
        for halt in (False, True):
            pairs = [parameters(kind, each, halt, **options) for each in ("eager", mode)]
            difference = max(float((a - b).abs().max()) for a, b in zip(*pairs, strict=True))
            found[f"{name}{', halted' if halt else ''}"] = difference
    return found


def sync(mode: str) -> dict[str, float]:
    """Return the number of replays. Raises an error if an operation within one waits for the GPU."""
    replays = 0

    def checked(function: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        replay, outputs = compiled.cuda_graph(function)

        def run() -> None:
            nonlocal replays
            replays += 1
            torch.cuda.set_sync_debug_mode("error")
            try:
                replay()
            finally:
                torch.cuda.set_sync_debug_mode("default")

        return run, outputs

    compiled.CAPTURES["cuda"] = checked
    loop_of(rein.PPO, mode, 256, **SHAPE).run(epochs=WARM_UP + 2)
    return {"replays": replays}


def rate(mode: str, num_envs: int, purejaxrl_checkout: str | None = None) -> dict[str, float]:
    """Return millions of env steps per second, the seconds until the first measured epoch, and MiB of memory."""
    begun = time.perf_counter()
    if mode == "PureJaxRL":
        shape = {"num_envs": num_envs, "rollout_steps": STEPS, "update_epochs": 2, "minibatches": 16}
        rounds: Any = purejaxrl(str(purejaxrl_checkout), **shape)
        next(rounds), next(rounds)
    else:
        rounds = (num_envs * STEPS for _ in loop_of(rein.PPO, mode, num_envs, **SHAPE).stream())
        for _ in range(WARM_UP):
            next(rounds)
        torch.cuda.synchronize()
    prepared, steps = time.perf_counter(), 0
    while time.perf_counter() < prepared + SECONDS:
        steps += sum(next(rounds) for _ in range(5))
    if mode != "PureJaxRL":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - prepared
    memory = torch.cuda.max_memory_reserved() / 2**20
    return {"rate": steps / seconds / 1e6, "prepared": prepared - begun, "memory": memory}


def child(*words: Any) -> dict[str, float] | str:
    """Run a row in a child process. Returns its result, or the last line of its error."""
    environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    command = [sys.executable, __file__, "--row", json.dumps(words)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        return (done.stderr.strip().splitlines() or ["no message"])[-1]
    return json.loads(done.stdout.splitlines()[-1])


def table(title: str, rows: dict[str, dict[str, float] | str]) -> None:
    """Print one row for each result."""
    print(title)
    for name, row in rows.items():
        cells = row if isinstance(row, str) else "  ".join(f"{key} {value:.4g}" for key, value in row.items())
        print(f"  {name:>26}  {cells}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Check and measure programs on a GPU.")
    parser.add_argument("parts", nargs="*", help=f"{', '.join(PARTS)}; all by default")
    parser.add_argument("--purejaxrl", help="a checkout of github.com/luchris429/purejaxrl")
    parser.add_argument("--row", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.row:
        name, *words = options.row
        print(json.dumps({"equality": equality, "sync": sync, "rate": rate}[name](*words)))
        return
    if not torch.cuda.is_available():
        print("gpu.py: torch finds no GPU, so nothing was measured")
        return
    parts = options.parts or PARTS
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    if "equality" in parts:
        rows = {mode: child("equality", mode) for mode in MODES[1:]}
        table("largest difference of parameters to operation by operation", rows)
    if "sync" in parts:
        table("replays without waiting for the GPU", {mode: child("sync", mode) for mode in MODES[1:]})
    if "throughput" in parts:
        for num_envs in NUM_ENVS:
            found = {mode: child("rate", mode, num_envs) for mode in MODES}
            if options.purejaxrl:
                checkout = str(Path(options.purejaxrl).resolve())
                found["PureJaxRL"] = child("rate", "PureJaxRL", num_envs, checkout)
            table(f"{num_envs:,} CartPoles: million env steps per s (goal {GOAL:g}), s until captured, MiB", found)


if __name__ == "__main__":
    main()
