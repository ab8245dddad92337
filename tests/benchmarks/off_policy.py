"""Measure learning from replay buffers and compare it with Stable-Baselines3: `python tests/benchmarks/off_policy.py`.

`updates`: gradient updates including sampling, for agents with two hidden layers of 256, batches of 256, observations
of 17 numbers and actions of 6 (DQN: one of 2), from a replay of 100,000 transitions. `replay`: appends of 8
environments and samples of 256 rows of these shapes, and prioritized samples with priority updates (with numba if it is
installed). `--mkl` adds agents that use MKL where rein would use oneDNN. `--repeated` adds rows for an agent's
operations, and for its matrix products, without anything else: those of two updates, repeated.

Each row is a child process with one thread. Rows take turns, so load of the machine affects all equally; compare
ratios. Times are CPU times. Stable-Baselines3 is in the dependency group `bench`.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import statistics
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from measuring import Rounds, run_workers, serve
from sizes import size

OBSERVATION, ACTION, BATCH, HIDDEN, ROWS = 17, 6, size(256, 8), size((256, 256), (8, 8)), size(100_000, 800)
REPEATS, UPDATES, SAMPLES, PUSHES = size(7, 1), size(100, 2), size(2_000, 2), size(20, 1)  # of each round
PRODUCTS = "mm", "addmm", "bmm", "baddbmm"
AGENTS = "SAC", "TD3", "DDPG", "DQN"
SB3 = importlib.util.find_spec("stable_baselines3") is not None
PARTS = "updates", "replay"

LIKE_SB3 = {"DQN": {"double": False, "tau": 1.0, "target_frequency": 10_000}}  # SB3's defaults


def spaces_of(name: str) -> tuple[Any, Any]:
    import numpy as np
    from gymnasium import spaces

    action = spaces.Discrete(2) if name == "DQN" else spaces.Box(-1.0, 1.0, (ACTION,), np.float32)
    return spaces.Box(-np.inf, np.inf, (OBSERVATION,), np.float32), action


def transitions(name: str, num_envs: int = 8) -> Any:
    """Yield random transitions of `num_envs` environments without end."""
    import torch

    from rein.types import Transition

    drawing = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Any:
        return torch.randn(num_envs, *shape, generator=drawing)

    never, always = torch.zeros(num_envs, dtype=torch.bool), torch.ones(num_envs, dtype=torch.bool)
    while True:
        action = torch.randint(2, (num_envs,), generator=drawing) if name == "DQN" else draw(ACTION).tanh()
        yield Transition(draw(OBSERVATION), action, draw(), draw() > 3.0, never, draw(OBSERVATION), always, {})


def filled(name: str, **options: Any) -> Any:
    """Return an agent with a full replay, after its first updates."""
    kind = getattr(importlib.import_module(f"rein.agents.{name.lower()}"), name)
    shape = {"hidden": HIDDEN, "batch_size": BATCH, "capacity": ROWS}
    agent, stream = kind(*spaces_of(name), **shape, **options, seed=0), transitions(name)
    while len(agent.replay) < ROWS:
        agent.record_observation(next(stream))
    agent.learn(10)
    return agent


def updates(name: str, mkl: bool = False, **options: Any) -> Rounds:
    if mkl:
        import torch

        torch.backends.mkldnn.matmul.fp32_precision = "ieee"
    agent = filled(name, **options)
    yield 0
    while True:
        agent.learn(UPDATES)
        yield UPDATES


def repeated(name: str, products: bool, **options: Any) -> Rounds:
    """Repeat the recorded operations of two updates, or only their matrix products."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    from rein.accelerate.products import fast_products

    calls: list[tuple[Any, Any, Any]] = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), how: Any = None) -> Any:
            calls.append((function, arguments, how or {}))
            return function(*arguments, **(how or {}))

    agent = filled(name, **options)
    with Recorder():
        agent.learn(3)
    names = [function.overloadpacket.__name__ for function, *_ in calls]
    first, _, last = (k for k, called in enumerate(names) if called == "randint")  # the first operation of each update
    calls = [calls[k] for k in range(first, last) if not products or names[k] in PRODUCTS]
    yield 0
    while True:
        with torch.no_grad(), fast_products(BATCH * HIDDEN[0] * HIDDEN[1]):  # as in all but small products of agents
            for _ in range(UPDATES // 2):
                for function, arguments, how in calls:
                    function(*arguments, **how)
        yield UPDATES


def sb3_updates(name: str) -> Rounds:
    import gymnasium
    import numpy as np
    import stable_baselines3
    from stable_baselines3.common.logger import configure

    class Nowhere(gymnasium.Env[Any, Any]):
        observation_space, action_space = spaces_of(name)

    shape = {"policy_kwargs": {"net_arch": list(HIDDEN)}, "batch_size": BATCH, "buffer_size": ROWS, "device": "cpu"}
    model = getattr(stable_baselines3, name)("MlpPolicy", Nowhere(), **shape)
    model.set_logger(configure(None, []))
    drawing = np.random.default_rng(0)

    def draw(*shape: int) -> Any:
        return drawing.standard_normal((1, *shape), dtype=np.float32)

    for _ in range(ROWS):
        action = drawing.integers(2, size=(1, 1)) if name == "DQN" else np.tanh(draw(ACTION))
        model.replay_buffer.add(draw(OBSERVATION), draw(OBSERVATION), action, draw(), draw() > 3.0, [{}])
    model.train(10, BATCH)
    yield 0
    while True:
        model.train(UPDATES, BATCH)
        yield UPDATES


def replay(name: str) -> Rounds:
    """Measure rein's replay: `push` (env steps), `sample` or `prioritized` (samples)."""
    import torch

    from rein.replay.prioritized import PrioritizedReplay
    from rein.replay.replay import Replay

    stream, drawing = transitions("SAC"), torch.Generator().manual_seed(0)
    some = [next(stream) for _ in range(100)]
    kept = (PrioritizedReplay if name == "prioritized" else Replay)(1_000_000)
    while len(kept) < ROWS:
        for transition in some:
            kept.append(transition)
    error_B = torch.rand(BATCH)
    yield 0
    while True:
        if name == "push":
            for _ in range(PUSHES):
                for transition in some:
                    kept.append(transition)
            kept.flush()
            yield PUSHES * len(some) * kept.num_envs
            continue
        for _ in range(SAMPLES):
            found = kept.sample(BATCH, drawing)
            if isinstance(kept, PrioritizedReplay):
                kept.weights(found.probability, 0.4)
                kept.update(found.row, error_B)
        yield SAMPLES


def sb3_replay(name: str) -> Rounds:
    import numpy as np
    from stable_baselines3.common.buffers import ReplayBuffer

    kept = ReplayBuffer(1_000_000, *spaces_of("SAC"), device="cpu", n_envs=8)
    drawing = np.random.default_rng(0)
    row = [drawing.standard_normal((8, size), dtype=np.float32) for size in (OBSERVATION, OBSERVATION, ACTION)]
    row += [drawing.standard_normal(8), np.zeros(8)]
    for _ in range(ROWS // 8):
        kept.add(*row, [{}] * 8)
    yield 0
    while True:
        if name == "push":
            for _ in range(100 * PUSHES):
                kept.add(*row, [{}] * 8)
            yield 800 * PUSHES
        else:
            for _ in range(SAMPLES):
                kept.sample(BATCH)
            yield SAMPLES


WORKERS: dict[str, Callable[..., Rounds]] = {
    "updates": updates,
    "repeated": repeated,
    "sb3_updates": sb3_updates,
    "replay": replay,
    "sb3_replay": sb3_replay,
}


def measure(specs: Mapping[str, tuple[str, dict[str, Any]]], repeats: int) -> dict[str, list[float]]:
    """Return the rates of the rounds by label. Workers are (name, options)."""
    found = run_workers(Path(__file__), specs, repeats)
    if died := [f"{label}: {error}" for label, error in found.items() if isinstance(error, str)]:
        raise SystemExit("\n".join(died))
    return {label: [one.steps / one.cpu for one in samples[2:]] for label, samples in found.items()}


def table(rates: Mapping[str, list[float]], unit: str) -> None:
    """Print medians, ranges, and ratios to SB3."""
    print(f"{unit:>34} per CPU second   (least to most)        of SB3")
    for label, found in rates.items():
        name = label.split(",", maxsplit=1)[0]
        peer = rates.get(f"{name}, SB3")
        share = f"{statistics.median(found) / statistics.median(peer):.2f}x" if peer else ""
        spread = f"({min(found):,.0f} to {max(found):,.0f})"
        print(f"  {label:>26} {statistics.median(found):>21,.0f}   {spread:>22} {share:>9}", flush=True)
    print()


def main() -> None:
    if sys.argv[1:2] and sys.argv[1] in WORKERS and sys.argv[2:3] and sys.argv[2].startswith("{"):
        serve(WORKERS[sys.argv[1]](**json.loads(sys.argv[2])))
        return
    parser = argparse.ArgumentParser(
        description="Measure learning from replay buffers, and compare it with Stable-Baselines3."
    )
    parser.add_argument("parts", nargs="*", help=f"{', '.join(PARTS)}; both by default")
    parser.add_argument("--repeats", type=int, default=REPEATS, help="rounds of each row")
    parser.add_argument("--agents", nargs="*", default=AGENTS, help="agents of `updates`")
    parser.add_argument("--compile", action="store_true", help="add rows with compile=True; takes minutes")
    parser.add_argument("--mkl", action="store_true", help="add rows with MKL's matrix products")
    parser.add_argument(
        "--repeated", action="store_true", help="add rows of an agent's operations and matrix products only"
    )
    options = parser.parse_args()
    if not SB3:
        print("Stable-Baselines3: not installed: pip install stable-baselines3==2.9.2\n")
    for part in options.parts or PARTS:
        specs: dict[str, tuple[str, dict[str, Any]]] = {}
        names = options.agents if part == "updates" else ("push", "sample", "prioritized")
        for name in names:
            like = {"name": name, **LIKE_SB3.get(name, {})}
            specs[f"{name}, rein"] = part, like
            if part == "updates" and options.compile:
                specs[f"{name}, rein, compile"] = part, {**like, "compile": True}
            if part == "updates" and options.mkl:
                specs[f"{name}, rein, MKL"] = part, {**like, "mkl": True}
            if part == "updates" and options.repeated:
                specs[f"{name}, operations alone"] = "repeated", {**like, "products": False}
                specs[f"{name}, products alone"] = "repeated", {**like, "products": True}
            if SB3 and name != "prioritized":  # SB3 has no prioritized replay
                specs[f"{name}, SB3"] = f"sb3_{part}", {"name": name}
        table(measure(specs, options.repeats), "updates" if part == "updates" else "env steps, or samples")


if __name__ == "__main__":
    main()
