"""Kills a busy writer of trajectories again and again, each time in the folder that the one before left.

usage: python killed_writer.py FOLDER KILLS INSIDE SEED: a process that has imported everything forks each writer. KILLS
of them are killed at random moments, then INSIDE of them within a system call of a write. One line of JSON each.
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

AT_ONCE = 10  # lives of one run
LARGE = 7


class Deadly:
    """The module `os`, in which the process is killed inside the `left`th call that changes the disk."""

    def __init__(self, left: int) -> None:
        self.left = left

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name not in ("write", "fsync", "replace"):
            return real

        def call(*arguments: Any, **options: Any) -> Any:
            self.left -= 1
            if self.left == 0:
                if name == "write":  # half of it
                    os.write(arguments[0], arguments[1][: len(arguments[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **options)

        return call


@functools.cache
def base(number: int) -> Trajectory:
    """What epochs are made from, so that the writer has more to do than whoever makes them."""
    return make_trajectory(number, steps=900 if number == LARGE else 200, num_envs=4)


def make(epoch: int) -> Trajectory:
    """An epoch of the runs that are killed; every seventh is cut into parts."""
    return base(epoch % LARGE or LARGE)._replace(epoch=epoch, first_step=10_000 * epoch)


def write(path: Path, acknowledged: int, die_at: int) -> None:
    """Go on with the run behind the last whole epoch that it has, for ever; say after each flush which one is safe."""
    store = HDF5Store(path, exist="resume", max_epochs=2, max_bytes=600_000)
    left = [entry.name for entry in (path / "trajectories").iterdir() if entry.suffix != ".h5"]
    last = int(open_run(path).epochs["number"][-1]) if list_files(path / "trajectories") else 0
    store.load_state_dict({"epoch": last})
    os.write(acknowledged, json.dumps({"left": left, "last": last}).encode() + b"\n")
    if die_at:
        sealed.os = Deadly(die_at)  # type: ignore[assignment]  # a stand-in
    for epoch in range(last + 1, 100_000):
        store.append(make(epoch))
        if epoch % 3 == 0:
            store.flush()
            os.write(acknowledged, f"{epoch}\n".encode())


def killed(path: Path, moment: float | int) -> dict[str, Any]:
    """What a writer said that was killed after seconds of work, or inside a call, and what it left."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            write(path, writing, moment if isinstance(moment, int) else 0)
        finally:
            os._exit(1)
    os.close(writing)
    with os.fdopen(reading) as lines:
        said = json.loads(lines.readline() or "{}")
        safe = []
        if isinstance(moment, float):
            safe.append(int(lines.readline()))  # it is at work
            time.sleep(moment)
            os.kill(child, signal.SIGKILL)
        safe += [int(line) for line in lines if line.endswith("\n")]
    said |= {"status": os.waitpid(child, 0)[1], "acknowledged": max(safe, default=0), "pid": child}
    return said | {"torn": [entry.name for entry in (path / "trajectories").iterdir() if entry.suffix != ".h5"]}


def main() -> None:
    """All kills, those of one run one after the other."""
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
