"""Copy a run to a new folder with fewer, larger trajectory files.

The epochs are written by an `HDF5Store`, so the limits of every run apply. A new file begins after each checkpoint,
because a run can be resumed there. The folder is built under a temporary name, compared with the original, and renamed.
"""

from __future__ import annotations

import filecmp
import fnmatch
import itertools
import math
import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np

from rein.errors import StoreError
from rein.files import absolute, inside, is_regular, make_folder, open_file
from rein.ops.trees import leaves
from rein.store.checkpoint_file import BEST, look, read_checkpoint
from rein.store.checkpoint_folder import FOLDER as CHECKPOINTS
from rein.store.checkpoint_folder import saved_files
from rein.store.folder import ASIDE, TRAJECTORIES, keep_stores_out, kept_by, list_files
from rein.store.format.sealed import sync_folder
from rein.store.hdf5 import HDF5Store
from rein.store.reader import open_run
from rein.types import Trajectory

MAX_BYTES = 64 << 20  # of data in a file, before compression
MAX_EPOCHS = 1000  # in a file


class Compacted(NamedTuple):
    """Number and bytes of the trajectory files before and after."""

    files_before: int
    bytes_before: int
    files: int
    bytes: int


def compact(run: str | Path, new: str | Path, max_bytes: int = MAX_BYTES, max_epochs: int = MAX_EPOCHS) -> Compacted:
    """Copy the folder `run` to `new` with trajectory files of up to `max_bytes` of data and `max_epochs` epochs.

    All other files are copied unchanged, except `aside/` and symbolic links. Stores inside the folder, such as the
    store of evaluations, are compacted too. `run` is not changed, and `new` can be resumed in its place.

    Raises:
        StoreError: `run` has no trajectories, is damaged or is being written; `new` is not empty or lies in `run`; the
            disk is full; or the copy differs from the original. Nothing is left in `new` in these cases.
    """
    run, new = absolute(run), absolute(new)
    if not inside(run, TRAJECTORIES).is_dir():
        raise StoreError(f"{run}: has no {TRAJECTORIES}/; give the folder of a run")
    if new.is_symlink() or (new.exists() and not (new.is_dir() and not any(new.iterdir()))):
        raise StoreError(f"{new}: exists; give the path of a new folder")
    if run.resolve() in (new.resolve(), *new.resolve().parents):
        raise StoreError(f"{new}: is inside {run}; give a path outside the run")
    temporary = new.with_name(f".{new.name}.tmp-{os.getpid()}")
    try:
        shutil.rmtree(temporary, ignore_errors=True)  # left by a dead process with the same pid
        make_folder(temporary.parent)
        with keep_stores_out(run):
            done = _copy_run(run, temporary, max_bytes, max_epochs)
        if new.is_dir():
            new.rmdir()  # Windows does not rename over an empty folder
        temporary.rename(new)
        sync_folder(new.parent)
        return done
    except OSError as error:
        raise StoreError(f"{run}: cannot be copied to {new}: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _copy_run(run: Path, target: Path, max_bytes: int, max_epochs: int) -> Compacted:
    borders = _borders(run)
    files: list[Path] = []  # trajectory files of `run`
    joined: list[Path] = []  # trajectory files of `target`
    for place, folders, names in os.walk(run, onerror=_raise):
        source, copy = Path(place), target / Path(place).relative_to(run)
        if TRAJECTORIES in folders and list_files(inside(source, TRAJECTORIES)):
            _join(source, copy, borders, max_bytes, max_epochs)
            files += list_files(source / TRAJECTORIES)
            joined += list_files(copy / TRAJECTORIES)
            folders[:] = [name for name in folders if name != ASIDE]
        copy.mkdir(exist_ok=True)
        others = {source / name for name in names} - set(files)
        for file in sorted(others):
            if is_regular(file) and not fnmatch.fnmatch(file.name, ".*.tmp-*"):
                _copy(file, copy / file.name)
        sync_folder(copy)
    return Compacted(len(files), _size(files), len(joined), _size(joined))


def _borders(run: Path) -> list[int]:
    """Return the epochs after which a store of the run has a checkpoint, in ascending order."""
    epochs: set[int] = set()
    for place, folders, _ in os.walk(run, onerror=_raise):
        folders[:] = [name for name in folders if name not in (TRAJECTORIES, ASIDE)]
        for file in saved_files(Path(place)):
            if look(file) is None and Path(place).name not in (CHECKPOINTS, BEST):
                continue  # not a checkpoint
            parts = read_checkpoint(file).state.get("parts")
            states = parts.values() if isinstance(parts, dict) else ()
            counts = [state.get("epoch") for state in states if isinstance(state, dict)]
            epochs |= {count for count in counts if type(count) is int}
    return sorted(epochs)


def _join(source: Path, target: Path, borders: list[int], max_bytes: int, max_epochs: int) -> None:
    """Write the epochs of `source` to larger files in `target`, and compare the epochs read from both."""
    run = open_run(source)
    if lost := set(list_files(source / TRAJECTORIES)) - set(run.files):
        raise StoreError(f"{min(lost)}: is incomplete: other parts of this epoch are missing; resume the run first")
    if kept_by(source)[1] is not None:  # `keep_best` removes single epochs, so each needs its own file
        max_epochs = 1
    store = HDF5Store(target, max_bytes=max_bytes, max_epochs=max_epochs, max_seconds=math.inf)
    try:
        if run.info:
            store.write_run(run.info)  # trajectory files contain a copy
        left = iter([*borders, math.inf])
        border, observed = next(left), True
        for trajectory in run:
            if observed != (trajectory.next_observation is not None):  # in a shared file, None is stored as NaN
                store.flush()
                observed = not observed
            if trajectory.epoch > border:
                store.flush()
                border = next(number for number in left if number >= trajectory.epoch)
            store.append(trajectory)
    finally:
        store.close()
    for before, after in itertools.zip_longest(map(_bits, run), map(_bits, open_run(target))):
        if before != after:
            raise StoreError(f"{source}: an epoch of the copy differs from the original; the copy was removed")


def _bits(trajectory: Trajectory) -> list[tuple[str, Any]]:
    def of(leaf: Any) -> Any:
        return (leaf.dtype, leaf.shape, leaf.tobytes()) if isinstance(leaf, np.ndarray) else repr(leaf)

    return [(path, of(leaf)) for path, leaf in leaves(trajectory._asdict())]


def _copy(source: Path, target: Path) -> None:
    with open_file(source) as file, open_file(target, "wb") as copy:
        shutil.copyfileobj(file, copy)
        copy.flush()
        os.fsync(copy.fileno())
    if not filecmp.cmp(source, target, shallow=False):
        raise StoreError(f"{source}: the copy differs from the original; the copy was removed")


def _size(files: list[Path]) -> int:
    return sum(file.lstat().st_size for file in files)


def _raise(error: OSError) -> NoReturn:
    raise error
