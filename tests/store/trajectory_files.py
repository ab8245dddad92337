"""Trajectories that tests write to a run and read back."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rein.store.hdf5 import HDF5Store
from rein.store.reader import open_run
from rein.types import Trajectory


def write(path: Path, trajectories: Iterable[Trajectory], **options: Any) -> Path:
    """Write a run, and return its path."""
    store = HDF5Store(path, **options)
    for trajectory in trajectories:
        store.append(trajectory)
    store.close()
    return path


def read(path: Path) -> list[Trajectory]:
    """Return all epochs of a run."""
    run = open_run(path)
    return [run.trajectory(epoch) for epoch in run.epochs["number"]]


def names(path: Path) -> list[str]:
    """Return the names of the trajectory files of a run, also of hidden ones."""
    return sorted(file.name for file in (path / "trajectories").iterdir())
