"""Kill a busy writer of trajectories repeatedly. Each writer continues in the folder of the one before.

Usage: python killed_writer.py FOLDER KILLS INSIDE SEED. Each writer is a fork. KILLS writers are killed at random
times, then INSIDE writers inside a system call of a write. Prints one line of JSON per writer.
"""

from __future__ import annotations

import functools
import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

from rein.store.folder import list_files
from rein.store.format import sealed
from rein.store.hdf5 import HDF5Store
from rein.store.reader import open_run
from rein.testing.store import make_trajectory
from rein.types import Trajectory
from tests.faults.broken_os import BrokenOs, dies

AT_ONCE = 10  # writers per run
LARGE = 7


@functools.cache
def base(number: int) -> Trajectory:
    """Return a cached trajectory from which epochs are made, so that writing dominates the run time."""
    return make_trajectory(number, steps=900 if number == LARGE else 200, num_envs=4)


def make(epoch: int) -> Trajectory:
    """Return an epoch of the runs. Every seventh epoch is split into parts."""
    return base(epoch % LARGE or LARGE)._replace(epoch=epoch, first_step=10_000 * epoch)


def write(path: Path, acknowledged: int, die_at: int) -> None:
    """Continue the run after its last complete epoch without end. Acknowledges the last epoch after each flush."""
    store = HDF5Store(path, exist="resume", max_epochs=2, max_bytes=600_000)
    left = [entry.name for entry in (path / "trajectories").iterdir() if entry.suffix != ".h5"]
    last = int(open_run(path).epochs["number"][-1]) if list_files(path / "trajectories") else 0
    store.load_state_dict({"epoch": last})
    os.write(acknowledged, json.dumps({"left": left, "last": last}).encode() + b"\n")
    if die_at:
        sealed.os = BrokenOs(die_at, dies, ("write", "fsync", "replace"))  # type: ignore[assignment]  # a fake module
    for epoch in range(last + 1, 100_000):
        store.append(make(epoch))
        if epoch % 3 == 0:
            store.flush()
            os.write(acknowledged, f"{epoch}\n".encode())


def killed(path: Path, moment: float | int) -> dict[str, Any]:
    """Run a writer and kill it after `moment` seconds (float) or inside a call (int). Returns its report."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            write(path, writing, moment if isinstance(moment, int) else 0)
        finally:
            os._exit(1)
    os.close(writing)
    with os.fdopen(reading) as lines:
        report = json.loads(lines.readline() or "{}")
        safe = []
        if isinstance(moment, float):
            safe.append(int(lines.readline()))  # wait until the writer is busy
            time.sleep(moment)
            os.kill(child, signal.SIGKILL)
        safe += [int(line) for line in lines if line.endswith("\n")]
    report |= {"status": os.waitpid(child, 0)[1], "acknowledged": max(safe, default=0), "pid": child}
    return report | {"torn": [entry.name for entry in (path / "trajectories").iterdir() if entry.suffix != ".h5"]}


def main() -> None:
    """Run and kill all writers."""
    torch.set_num_threads(1)
    folder, kills, inside, seed = Path(sys.argv[1]), *map(int, sys.argv[2:])
    draw = random.Random(seed)
    for epoch in range(1, LARGE + 1):
        make(epoch)
    for number in range(kills + inside):
        moment = draw.random() * 0.2 if number < kills else draw.randrange(1, 40)
        print(json.dumps(killed(folder / str(number // AT_ONCE), moment) | {"run": number // AT_ONCE}), flush=True)


if __name__ == "__main__":
    main()
