"""Train in a folder on a small disk until it is full, resume after freeing space, and print the results as JSON.

Usage: python full_disk.py FOLDER ahead|late [BYTES]. With `late`, free space is not checked in advance, so the write
fails. With BYTES, a disk of that size is simulated.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import torch

import rein
from rein.agents.q_learning import QLearning
from rein.envs.gridworld import Gridworld
from rein.errors import StoreError
from rein.store.format import sealed
from rein.store.hdf5 import HDF5Store

BALLAST = 1 << 20  # bytes that are freed afterwards


class Small:
    """Module `os` that simulates a disk of `room` bytes in a folder."""

    f_blocks = f_frsize = 1

    def __init__(self, folder: Path, room: int) -> None:
        self._folder, self._room = folder, room

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    @property
    def f_bavail(self) -> int:
        """Free bytes."""
        return self._room - sum(file.stat().st_size for file in self._folder.rglob("*") if file.is_file())

    f_bfree = f_bavail

    def statvfs(self, folder: Path) -> Any:
        """Return the status of the simulated disk."""
        return self

    def write(self, descriptor: int, data: memoryview) -> int:
        """Write as many bytes as fit. Raises OSError if the disk is full."""
        if self.f_bavail <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return os.write(descriptor, data[: self.f_bavail])


def train(store: HDF5Store, epochs: int, state: dict[str, Any] | None = None) -> None:
    """Train, flush after each epoch, and record the last flushed epoch in `LAST`."""
    environment = Gridworld(num_envs=64, seed=0)
    agent = QLearning(environment.single_observation_space, environment.single_action_space, seed=0)
    loop = rein.training_loop(agent, environment, store, seed=0)
    if state is not None:
        loop.load_state_dict(state)

    @loop.epoch_ended
    def ask(state: rein.State) -> None:
        state.request(wait)

    def wait(state: rein.State) -> None:
        store.flush()
        LAST.update(safe=state.epoch, state=loop.state_dict())

    try:
        loop.run(epochs=epochs, iterations=40)
    finally:
        LAST["status"] = loop.state.status


def names(path: Path) -> list[str]:
    """Return the trajectory files, including unfinished ones."""
    return sorted(entry.name for entry in (path / "trajectories").iterdir())


def look(path: Path) -> dict[str, Any]:
    """Verify all files, and return their number and the epochs that can be read."""
    whole = 0
    for name in names(path):
        sealed.verify(path / "trajectories" / name)
        whole += 1
    run = rein.open_run(path)
    return {"files": whole, "epochs": run.epochs["number"].tolist(), "read": sum(1 for _ in run)}


def main() -> None:
    """Train until the disk is full, then free some space and resume the run."""
    torch.set_num_threads(1)
    folder, how = Path(sys.argv[1]), sys.argv[2]
    if len(sys.argv) > 3:
        sealed.os = Small(folder, int(sys.argv[3]))  # type: ignore[assignment]  # a fake module
    (folder / "ballast").write_bytes(bytes(BALLAST))
    if how == "late":
        sealed.check_room = lambda folder, size: None
    train(HDF5Store(folder / "warm", max_epochs=1), 1)
    before = len(os.listdir("/dev/fd")), threading.active_count()
    store = HDF5Store(folder / "run", max_epochs=1)
    report: dict[str, Any] = {"errors": []}
    try:
        train(store, 10_000)
    except StoreError as error:
        report["errors"].append(str(error))
    store.close()  # does not raise the error again
    report |= {"safe": LAST["safe"], "status": LAST["status"], "full": look(folder / "run")}
    state = LAST["state"]
    (folder / "ballast").unlink()
    store = HDF5Store(folder / "run", exist="resume", max_epochs=1)
    report["left"] = [name for name in names(folder / "run") if not name.endswith(".h5")]
    train(store, report["safe"] + 2, state)
    store.close()
    report |= {"resumed": look(folder / "run"), "descriptors": len(os.listdir("/dev/fd")) - before[0]}
    print(json.dumps(report | {"threads": threading.active_count() - before[1]}))


LAST: dict[str, Any] = {}

if __name__ == "__main__":
    main()
