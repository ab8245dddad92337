"""Measure the cost of writing all trajectories: `python tests/benchmarks/storage.py writing`.

The two variants of a pair alternate in one process with one thread. CPU times of all threads count, and the median of
the ratios is reported. The CartPole recipe runs for several numbers of epochs. The fixed part of its cost is the
intercept of a line through the median seconds of the shortest and the longest runs. The data is that of PPO on
CartPole-v1: observation, action, reward, ends, valid, seed, value, log_prob.

Shapes: T steps, N environments.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium
import numpy as np
import torch
from measuring import memory, verdict
from sizes import size

import rein
from rein.agents.ppo import PPO
from rein.envs.cartpole import CartPole
from rein.episodes.episode_statistics import EpisodeStatistics
from rein.recipes.cartpole_ppo import cartpole
from rein.replay.rollout import RowBuffer
from rein.store.memory_store import MemoryStore
from rein.types import Trajectory

ENVIRONMENTS, PAIRS = size(64, 4), size(7, 2)
RECIPE_PAIRS = size(30, 2)  # single pairs differ by 10 % on a shared machine; the target is 5 %
RECIPE_EPOCHS = size((1, 25, 60), (1, 2))  # solving takes about 25 epochs, 204,800 env steps
RECIPE_TARGET, FIXED_TARGET = 0.05, 0.05  # share of the longest run, seconds per run
BARE_STEPS, EPOCH = size(6_000, 32), size(128, 16)
LOGGED_EPOCHS = size(500, 5)  # of 128 steps of 64 environments: 4.1 M env steps
NATIVE_EPOCHS, MINARI_STEPS, LARGE_EPOCHS = size(60, 2), size(8_000, 50), size(48, 2)
FIELDS = "observation", "reward", "terminated", "truncated", "action", "valid"
MINARI = all(importlib.util.find_spec(name) for name in ("minari", "jax"))  # its DataCollector needs both


class Cost(NamedTuple):
    """CPU and wall seconds of a function."""

    cpu: float
    wall: float


def cost(work: Callable[[], Any]) -> Cost:
    cpu, wall = time.process_time(), time.perf_counter()
    work()
    return Cost(time.process_time() - cpu, time.perf_counter() - wall)


def in_turns(
    plain: Callable[[], Any], kept: Callable[[Path], Any], folder: Path, pairs: int = PAIRS
) -> list[tuple[float, float]]:
    """Return the CPU seconds of both variants for each pair."""
    found = [(cost(plain).cpu, cost(lambda n=n: kept(folder / str(n))).cpu) for n in range(pairs + 1)]
    return found[1:]  # the first pair imports and allocates


def report(name: str, pairs: list[tuple[float, float]], target: float | None = None) -> float:
    """Print the cost of the second variant of the pairs. Returns its median in CPU seconds."""
    plain, kept = (statistics.median(seconds) for seconds in zip(*pairs, strict=True))
    low, middle, high = statistics.quantiles((kept / plain - 1.0 for plain, kept in pairs), n=4)
    print(f"{name}: {plain:.2f} CPU s, stored {kept:.2f}")
    print(f"  additional cost of {len(pairs)} pairs: median {middle:+.1%}, quartiles {low:+.1%} and {high:+.1%}")
    if target is not None:
        print(f"  target {target:.0%} at most: {verdict(middle <= target)}", flush=True)
    return statistics.median(kept - plain for plain, kept in pairs)


def train_recipe(epochs: int, path: Path | None = None) -> None:
    """Train the recipe for a fixed number of epochs."""
    store = None if path is None else rein.HDF5Store(path)
    loop = cartpole(store, stop_when_solved=False)
    loop.run(epochs=epochs)
    if store is not None:
        store.close()


def show_recipe(folder: Path) -> None:
    """Print the cost for runs of several lengths, and its part that does not depend on the length."""
    more: dict[int, float] = {}
    for epochs in RECIPE_EPOCHS:
        train = functools.partial(train_recipe, epochs)
        pairs = in_turns(train, train, folder / f"recipe-{epochs}", RECIPE_PAIRS)
        target = RECIPE_TARGET if epochs == RECIPE_EPOCHS[-1] else None
        more[epochs] = report(f"CartPole recipe, {epochs} epochs", pairs, target)
    first, last = RECIPE_EPOCHS[0], RECIPE_EPOCHS[-1]
    per_epoch = (more[last] - more[first]) / (last - first)
    fixed = more[first] - per_epoch * first
    print(f"  fixed part {1e3 * fixed:.0f} ms per run, and {1e3 * per_epoch:.2f} ms per epoch")
    print(f"  target {1e3 * FIXED_TARGET:.0f} ms per run: {verdict(fixed <= FIXED_TARGET)}")


def rows_of(observation: np.ndarray, actions_TN: np.ndarray) -> RowBuffer:
    """Return the rows of an epoch with these actions. A custom loop overwrites the other fields in place."""
    rows, flags = RowBuffer(EPOCH), torch.ones(ENVIRONMENTS, dtype=torch.bool)
    row = {"observation": torch.from_numpy(observation), "reward": torch.zeros(ENVIRONMENTS), "valid": flags}
    for action_N in torch.from_numpy(actions_TN):
        rows.append(row | {"action": action_N, "terminated": flags, "truncated": flags})
    return rows


def step_bare(environments: gymnasium.vector.SyncVectorEnv, path: Path | None) -> None:
    """Step Gymnasium's environments, and store every field of every step if there is a path."""
    actions_TN = np.random.default_rng(0).integers(0, 2, (EPOCH, ENVIRONMENTS))
    observation, _ = environments.reset(seed=0)
    store, rows = None if path is None else rein.HDF5Store(path), rows_of(observation, actions_TN)
    found, columns = EpisodeStatistics(ENVIRONMENTS, rows), {name: rows[name].numpy() for name in FIELDS}
    seen, reward_TN, terminated_TN, truncated_TN = (columns[name] for name in FIELDS[:4])
    for step in range(BARE_STEPS):
        t = step % EPOCH
        following, reward, terminated, truncated, _ = environments.step(actions_TN[t])
        if store is not None:
            seen[t], reward_TN[t], terminated_TN[t], truncated_TN[t] = observation, reward, terminated, truncated
            if t == EPOCH - 1:
                end_epoch(store, rows, found, (step + 1) // EPOCH, torch.from_numpy(following))
        observation = following
    if store is not None:
        store.close()


def end_epoch(store: Any, rows: Any, found: EpisodeStatistics, epoch: int, following: torch.Tensor) -> None:
    fields, episodes = {name: rows[name] for name in FIELDS}, found.episodes()
    store.append(Trajectory(epoch, "completed", found.first_row_step, fields, following, episodes, {}, {}))
    found.begin_epoch(epoch * EPOCH)


def record_native(path: Path, epochs: int) -> int:
    """Record random actions in rein's CartPole; return the number of env steps."""
    environment, rows = CartPole(num_envs=ENVIRONMENTS, seed=0), RowBuffer(EPOCH)
    found, store = EpisodeStatistics(ENVIRONMENTS, rows), rein.HDF5Store(path)
    observation = environment.reset()
    action_TN = torch.randint(2, (EPOCH, ENVIRONMENTS), generator=torch.Generator().manual_seed(0))
    valid_N = torch.ones(ENVIRONMENTS, dtype=torch.bool)
    for epoch in range(1, epochs + 1):
        for t in range(EPOCH):
            seed_N = environment.episode_seeds
            step = environment.apply_action(action_TN[t])
            row = dict(observation=observation, action=action_TN[t], reward=step.reward, terminated=step.terminated)
            row |= dict(truncated=step.truncated, valid=valid_N, next_observation=step.final_observation, seed=seed_N)
            rows.append(row)
            observation = step.observation
        end_epoch(store, rows, found, epoch, observation)
        rows.clear()
    store.close()
    return epochs * EPOCH * ENVIRONMENTS


def record_minari(steps: int) -> int:
    """Record random actions in Gymnasium's CartPole with Minari's DataCollector; return the number of env steps."""
    import minari

    environment = minari.DataCollector(gymnasium.make("CartPole-v1"), record_infos=False)
    actions = np.random.default_rng(0).integers(0, 2, steps)
    environment.reset(seed=0)
    for action in actions:
        _, _, terminated, truncated, _ = environment.step(int(action))
        if terminated or truncated:
            environment.reset()
    environment.close()
    return steps


def one_epoch(steps: int = EPOCH) -> Trajectory:
    """Return a trajectory of PPO with 64 CartPoles."""
    environment, store = CartPole(num_envs=ENVIRONMENTS, seed=0), MemoryStore()
    agent = PPO(environment, rollout_steps=steps, seed=0)
    rein.train(agent, environment, store, epochs=3, iterations=steps, seed=0)
    return store.trajectories[-1]


def log(path: Path, epoch: Trajectory) -> tuple[int, int, int]:
    """Write many epochs; return the number of env steps, bytes of data and bytes on disk."""
    store = rein.HDF5Store(path)
    for number in range(1, LOGGED_EPOCHS + 1):
        store.append(epoch._replace(epoch=number, first_step=number * EPOCH))
    store.close()
    data = LOGGED_EPOCHS * sum(column.nbytes for column in epoch.fields.values())
    disk = sum(file.stat().st_size for file in store.path.rglob("*.h5"))
    return LOGGED_EPOCHS * EPOCH * ENVIRONMENTS, data, disk


def write_plainly(path: Path, size: int) -> None:
    """Write bytes sequentially, followed by fsync."""
    block = memoryview(bytes(range(256)) * (1 << 18))  # 64 MiB
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        while size > 0:
            size -= os.write(descriptor, block[:size])
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
        path.unlink()


def show_writer(folder: Path) -> None:
    epoch, rates, shares = one_epoch(), [], []
    for number in range(PAIRS):
        found: list[tuple[int, int, int]] = []
        spent = cost(lambda number=number, found=found: found.append(log(folder / f"log-{number}", epoch)))
        steps, data, disk = found[0]
        plain = cost(lambda data=data: write_plainly(folder / "plain", data))
        rates.append(steps / spent.cpu)
        shares.append(plain.wall / spent.wall)
        print(
            f"  {steps / spent.cpu / 1e6:.2f} M env steps per CPU s; {data / spent.wall / 1e6:.0f} MB of data per wall "
            f"s ({disk / 1e6:.0f} MB on disk), plain writes {data / plain.wall / 1e6:.0f}: {shares[-1]:.2f} of them"
        )
    rate, share = statistics.median(rates), statistics.median(shares)
    print(
        f"the writer alone: {rate / 1e6:.2f} M env steps per CPU s; in wall time {share:.2f} of plain writes with fsync"
    )
    print(f"  targets 5 M: {verdict(rate >= 5e6)}; 0.25: {verdict(share >= 0.25)}")


def measure_memory(folder: Path) -> None:
    """Print the increase of peak memory while files of 64 MiB are written. Needs a separate process on Linux."""
    floats = np.random.default_rng(0).standard_normal((256, ENVIRONMENTS, 128), np.float32)  # 8 MiB
    small = one_epoch(8)
    warm = rein.HDF5Store(folder / "warm")
    warm.append(small)
    warm.close()
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    before = memory("VmHWM")
    store = rein.HDF5Store(folder / "run")
    for number in range(1, LARGE_EPOCHS + 1):
        fields = {"observation": floats, "valid": np.ones(floats.shape[:2], bool)}
        store.append(small._replace(epoch=number, first_step=number * 256, fields=fields))
    store.close()
    files = [file.stat().st_size for file in store.path.rglob("*.h5")]
    print(json.dumps({"grown": memory("VmHWM") - before, "file": max(files) / 2**20}))


def show_memory(folder: Path) -> None:
    command = [sys.executable, __file__, "memory", str(folder / "memory")]
    (folder / "memory").mkdir()
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    share = found["grown"] / found["file"]
    print(f"peak memory of the writer: {found['grown']:.0f} MiB, {share:.2f} times the size of a file")
    print(f"  target 4 at most: {verdict(share <= 4)}")


def show_recording(folder: Path) -> None:
    ours, theirs = [], []
    for number in range(PAIRS):
        steps: list[int] = []
        path = folder / f"native-{number}"
        spent = cost(lambda path=path, steps=steps: steps.append(record_native(path, NATIVE_EPOCHS)))
        ours.append(steps[0] / spent.cpu)
        if MINARI:
            spent = cost(lambda steps=steps: steps.append(record_minari(MINARI_STEPS)))
            theirs.append(steps[1] / spent.cpu)
    mine = statistics.median(ours)
    print(f"recording the native CartPole, N={ENVIRONMENTS}: {mine:,.0f} env steps per CPU s")
    if not theirs:
        print('  the DataCollector of Minari is not installed: pip install "minari[create]"')
        return
    peer = statistics.median(theirs)
    print(f"  Minari's DataCollector on Gymnasium's CartPole-v1: {peer:,.0f}; {mine / peer:.0f} times as many")
    print(f"  target 50 times: {verdict(mine >= 50 * peer)}")


def main() -> None:
    """Run all measurements."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        show_recipe(folder)
        environments = gymnasium.vector.SyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * ENVIRONMENTS)
        plain, kept = (lambda: step_bare(environments, None)), (lambda path: step_bare(environments, path))
        report(f"bare SyncVectorEnv, N={ENVIRONMENTS}", in_turns(plain, kept, folder / "bare"), 0.10)
        show_recording(folder)
        show_writer(folder)
        show_memory(folder)


if __name__ == "__main__":
    measure_memory(Path(sys.argv[2])) if sys.argv[1:2] == ["memory"] else main()
