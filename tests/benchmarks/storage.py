"""Measure writing and reading of trajectories: `python tests/benchmarks/storage.py [writing] [reading]`, default both.

`writing` runs `storage_writing.py`. `reading` measures batches per CPU second on one thread, compared with arrays in
memory, as medians of interleaved repeats. Load of the machine affects all rows equally, so compare ratios. A batch has
256 sequences of 16 transitions, or 4,096 transitions, sampled from 200,000 steps: observation 17, action 6, reward,
ends, next observation. The files are in the page cache. TorchRL, if installed, samples the same data from a memory map
that stores whole transitions episode by episode.

Shapes: T steps, N environments, O features of an observation, A of an action.
"""

from __future__ import annotations

import os

os.environ.update(OMP_NUM_THREADS="1")

import importlib.util
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from measuring import verdict
from sizes import size

import rein
from rein.store import datasets
from rein.types import Episodes, Trajectory

STEPS, ENVIRONMENTS, EPOCHS, FILES, EPISODE = size(200_000, 2_000), 8, size(50, 5), 5, size(250, 25)
SEQUENCES, LENGTH = size(256, 4), 16
FEATURES, ACTIONS = 17, 6
REPEATS, SECONDS = size(9, 1), size(0.3, 0.001)  # of CPU time each
TARGET, TIMES_TORCHRL = 0.5, 8.0
TORCHRL = importlib.util.find_spec("torchrl") is not None


def write_run(path: Path) -> dict[str, np.ndarray]:
    """Write a run with episodes of `EPISODE` steps to several files; return its fields, (T, N, ...)."""
    random = np.random.default_rng(0)
    total = STEPS // ENVIRONMENTS
    lead = (total, ENVIRONMENTS)
    ended = np.broadcast_to((np.arange(total) % EPISODE == EPISODE - 1)[:, None], lead)
    fields: dict[str, np.ndarray] = {
        "observation": random.standard_normal((*lead, FEATURES), np.float32),
        "action": random.standard_normal((*lead, ACTIONS), np.float32),
        "reward": random.standard_normal(lead, np.float32),
        "terminated": np.zeros(lead, bool),
        "truncated": ended.copy(),
        "valid": np.ones(lead, bool),
    }
    store = rein.HDF5Store(path, max_epochs=EPOCHS // FILES)
    for epoch in range(EPOCHS):
        begin, stop = epoch * total // EPOCHS, (epoch + 1) * total // EPOCHS
        row_E, environment_E = np.nonzero(ended[begin:stop])
        last_E = begin + row_E
        store.append(
            Trajectory(
                epoch=epoch + 1,
                status="completed",
                first_step=begin,
                fields={name: array[begin:stop] for name, array in fields.items()},
                next_observation=fields["observation"][min(stop, total - 1)],
                episodes=Episodes(
                    id=last_E // EPISODE * ENVIRONMENTS + environment_E,
                    environment=environment_E,
                    first_step=last_E - EPISODE + 1,
                    last_step=last_E,
                    seed=np.full(len(row_E), -1),
                    episode_return=np.zeros(len(row_E)),
                    length=np.full(len(row_E), EPISODE),
                    terminated=np.zeros(len(row_E), bool),
                    truncated=np.ones(len(row_E), bool),
                    final_observation=fields["observation"][last_E, environment_E],
                ),
                metrics={},
                clocks={},
            )
        )
    store.close()
    return fields


def in_memory(fields: dict[str, np.ndarray], take: bool) -> Callable[[np.ndarray], Any]:
    """Return a function that reads the same batches from arrays in memory, with `numpy.take` or by indexing."""
    columns = {name: field.reshape(STEPS, *field.shape[2:]) for name, field in fields.items() if name != "valid"}
    columns["next_observation"] = np.roll(columns["observation"], -ENVIRONMENTS, axis=0)
    if take:
        return lambda index: {name: np.take(column, index, axis=0) for name, column in columns.items()}
    return lambda index: {name: column[index] for name, column in columns.items()}


def of_torchrl(fields: dict[str, np.ndarray], folder: Path, cached: bool) -> Callable[[], Any]:
    """Return TorchRL's sampling of slices. With `cached`, episode ends are found once, otherwise for each sample."""
    import torch
    from tensordict import TensorDict
    from torchrl.data import LazyMemmapStorage, SliceSampler, TensorDictReplayBuffer

    def column(array: np.ndarray) -> torch.Tensor:
        joined = np.ascontiguousarray(array.swapaxes(0, 1)).reshape(STEPS, *array.shape[2:])
        return torch.from_numpy(joined if joined.ndim > 1 else joined[:, None])

    after = {"observation": np.roll(fields["observation"], -1, axis=0), "done": fields["truncated"]}
    after |= {name: fields[name] for name in ("reward", "terminated", "truncated")}
    following = {name: column(array) for name, array in after.items()}
    data = {"observation": column(fields["observation"]), "action": column(fields["action"]), "next": following}
    buffer = TensorDictReplayBuffer(
        storage=LazyMemmapStorage(STEPS, scratch_dir=folder),
        sampler=SliceSampler(slice_len=LENGTH, end_key=("next", "done"), truncated_key=None, cache_values=cached),
        batch_size=SEQUENCES * LENGTH,
    )
    buffer.extend(TensorDict(data, [STEPS]))
    drawn = buffer.sample()["next", "done"].reshape(SEQUENCES, LENGTH)
    assert not drawn[:, :-1].any()  # slices stay within episodes
    return buffer.sample


def measure(work: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Return median calls per CPU second by name."""
    found: dict[str, list[float]] = {name: [] for name in work}
    for name in list(work) * REPEATS:
        calls, begin = 0, time.process_time()
        while time.process_time() - begin < SECONDS:
            work[name]()
            calls += 1
        found[name].append(calls / (time.process_time() - begin))
    return {name: statistics.median(rates) for name, rates in found.items()}


def opening(path: Path) -> None:
    for how in ("first time, scanned in a child process", "second time"):
        begin, cpu = time.perf_counter(), time.process_time()
        run = rein.open_run(path)
        rows = int(run.epochs["length"].sum())
        wall, cpu = time.perf_counter() - begin, time.process_time() - cpu
        what = f"{len(run.files)} files, {sum(file.stat().st_size for file in run.files) / 2**20:.0f} MiB, {rows} rows"
        print(f"opening {what}, {how}: {wall:.3f} s, {cpu:.3f} CPU s in this process")


def main() -> None:
    parts = sys.argv[1:] or ["writing", "reading"]
    if "writing" in parts:
        import storage_writing

        storage_writing.main()
    if "reading" in parts:
        read()


def read() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run"
        fields = write_run(path)
        if not TORCHRL:
            print("TorchRL is not installed")
        opening(path)
        for small, how in ((datasets._SMALL, "small fields held in memory"), (0, "all floats memory-mapped by file")):
            datasets._SMALL = small
            compare(path, fields, how, Path(folder) / "torchrl")


def compare(path: Path, fields: dict[str, np.ndarray], how: str, scratch: Path) -> None:
    run, draws = rein.open_run(path), np.random.default_rng(1)
    sequences, transitions = run.sequences(LENGTH), run.transitions()
    starts = np.flatnonzero(np.arange(STEPS) // ENVIRONMENTS % EPISODE <= EPISODE - LENGTH)
    span = ENVIRONMENTS * np.arange(LENGTH)
    assert len(sequences) == len(starts) and len(transitions) == STEPS
    indexing, taking = in_memory(fields, take=False), in_memory(fields, take=True)
    check = draws.integers(0, len(starts), SEQUENCES)
    assert np.array_equal(sequences[check].observation, indexing(starts[check][:, None] + span)["observation"])

    def sequence_rows() -> np.ndarray:
        return starts[draws.integers(0, len(starts), SEQUENCES)][:, None] + span

    def rows() -> np.ndarray:
        return draws.integers(0, STEPS, SEQUENCES * LENGTH)

    for what, dataset, batch, index in (
        ("sequences", sequences, SEQUENCES, sequence_rows),
        ("transitions", transitions, SEQUENCES * LENGTH, rows),
    ):
        work: dict[str, Callable[[], Any]] = {
            "arrays in memory, indexed": lambda index=index: indexing(index()),
            "arrays in memory, numpy.take": lambda index=index: taking(index()),
            f"run.{what}": lambda d=dataset, batch=batch: d[draws.integers(0, len(d), batch)],
        }
        peer = "TorchRL, slices of its memory map"
        if what == "sequences" and TORCHRL:
            work |= {f"{peer}, default options": of_torchrl(fields, scratch / how / "plain", cached=False)}
            work |= {peer: of_torchrl(fields, scratch / how / "cached", cached=True)}
        found = measure(work)
        indexed, taken, ours = list(found.values())[:3]
        print(f"\n{what}, {how}: batches of {SEQUENCES * LENGTH} transitions per CPU second")
        for name, rate in found.items():
            print(f"  {name:48} {rate:8.0f}   {rate / indexed:.2f} of indexing, {rate / taken:.2f} of numpy.take")
        print(f"  target {TARGET} of indexing: {verdict(ours >= TARGET * indexed)}")
        if peer in found:
            times = ours / found[peer]
            print(f"  target {TIMES_TORCHRL:.0f} times TorchRL: {verdict(times >= TIMES_TORCHRL)}, {times:.1f} times")


if __name__ == "__main__":
    main()
