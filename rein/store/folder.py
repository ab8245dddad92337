"""The folder of a run: create and lock it, list its trajectory files, and move files aside.

Layout::

    runs/<name>/
      trajectories/000001-000128.h5     epochs 1 to 128
      trajectories/000129-part-02.h5    second part of epoch 129, which is too large for one file
      aside/epoch-000100/               files newer than the checkpoint from which a run was resumed
"""

from __future__ import annotations

import bisect
import contextlib
import errno
import gc
import importlib
import itertools
import logging
import os
import re
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rein.errors import StoreError
from rein.files import LARGEST, inside, make_folder, read_file, read_json
from rein.store.format.sealed import reason_of, remove_leftovers, sync_folder, write_whole
from rein.store.format.trajectory_writer import Part

TRAJECTORIES, ASIDE = "trajectories", "aside"

_NAME = re.compile(r"(\d{6,18})-(?:(\d{6,18})|part-(\d{2,9}))\.h5")

fcntl: Any = None  # on Windows
with contextlib.suppress(ImportError):
    fcntl = importlib.import_module("fcntl")

_TAKEN = (errno.EWOULDBLOCK, errno.EACCES)

logger = logging.getLogger(__name__)


class Cut(NamedTuple):
    """File whose rows are moved aside, all or some of them."""

    path: Path
    stays: bytes | None  # new content of the file; None removes it
    moves: bytes  # content of the file in `aside/`


def file_name(first: int, last: int, part: Part) -> str:
    """Return the name of the file for the epochs `first` to `last`, or for a part of epoch `first`."""
    return f"{first:06d}-{last:06d}.h5" if part.total == 1 else f"{first:06d}-part-{part.number:02d}.h5"


def list_files(folder: Path) -> list[Path]:
    """Return the trajectory files in a folder, ordered by epoch and part."""
    files = [path for path in folder.iterdir() if _NAME.fullmatch(path.name)] if folder.is_dir() else []
    return sorted(files, key=_order)


def files_of(folder: Path, epoch: int) -> list[Path]:
    """Return the files that hold only this epoch: one file, its parts, or none."""
    return [path for path in list_files(folder) if _order(path)[:2] == (epoch, epoch)]


def is_whole(folder: Path, epoch: int) -> bool:
    """Return whether an epoch is complete in separate files. A partly removed epoch lacks its first part."""
    files = files_of(folder, epoch)
    return bool(files) and _order(files[0])[2] <= 1


def claim(path: Path, exist: str) -> Path:
    """Create or enter the folder of a run, and remove the temporary files of dead processes.

    Returns the folder that is used. `exist` decides about an existing folder: see `HDF5Store`. Raises StoreError.
    """
    if exist not in ("error", "resume", "new"):
        raise ValueError(f"exist={exist!r}: must be 'error', 'resume' or 'new'")
    try:
        if path.is_file():
            raise StoreError(f"{path}: is a file; a store needs a folder, such as runs/mine")
        if exist == "error" and path.exists() and not (path.is_dir() and not any(path.iterdir())):
            raise StoreError(f"{path}: exists; exist='resume' continues the run, exist='new' takes the next free name")
        folder = _make_fresh(path) if exist == "new" else path
        make_folder(inside(folder, TRAJECTORIES))
        for changed in (folder.parent, folder):
            sync_folder(changed)
        aside = [path for path in inside(folder, ASIDE).glob("*") if not path.is_symlink()]
        places = (folder, folder / TRAJECTORIES, *aside)
        removed = [path for place in places for path in remove_leftovers(place)]
    except OSError as error:
        raise StoreError(f"{path}: cannot be created or opened: {reason_of(error)}") from error
    if folder != path:
        logger.warning("%s exists; this run is stored in %s", path, folder)
    if removed:
        logger.warning("%s: removed %d unfinished file(s) of dead processes", folder, len(removed))
    return folder


def first_epoch(run: Path) -> int | None:
    """Return the first epoch of a run, or None if it is unknown.

    It is above 1 if the run was begun in another folder.
    """
    every, best = kept_by(run)
    files = [_order(path)[0] for path in list_files(inside(run, TRAJECTORIES))]
    if best is not None or not files:
        return None
    return min(files) if min(files) > every else 1


def epochs_of(path: Path) -> tuple[int, int]:
    """Return the first and the last epoch of a trajectory file, as its name gives them."""
    return _order(path)[:2]


def missing_epochs(run: Path, epochs: Iterable[float], last: int) -> list[int]:
    """Return the epochs in `epochs`, up to `last`, that should be stored but are in no trajectory file.

    Only the names of the files are read. Returns an empty list for a store that keeps the best epochs.
    """
    every, best = kept_by(run)
    parts = parts_of(run)
    if best is not None or not every or ("store" in parts and "rows" not in parts):  # without rows: nothing is stored
        return []
    spans = [_order(path)[:2] for path in list_files(inside(run, TRAJECTORIES))]
    ends = list(itertools.accumulate((end for _, end in spans), max))
    expected = {int(number) for number in epochs if number == number and number <= last and number % every == 0}
    before = {epoch: bisect.bisect_right(spans, epoch, key=lambda span: span[0]) for epoch in expected}
    return sorted(epoch for epoch in expected if before[epoch] == 0 or ends[before[epoch] - 1] < epoch)


def spans_of(numbers: Sequence[int]) -> str:
    """Return ascending numbers in words: `1 to 3, 7`."""
    begins = [i for i in range(len(numbers)) if i == 0 or numbers[i] > numbers[i - 1] + 1]
    parts = [numbers[begin:end] for begin, end in itertools.pairwise([*begins, len(numbers)])]
    return ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]} to {part[-1]}" for part in parts)


def newer_files(run: Path, after: int) -> list[Path]:
    """Return the trajectory files with epochs newer than `after`. Raises StoreError if one also has older epochs."""
    newer = [path for path in list_files(inside(run, TRAJECTORIES)) if _order(path)[1] > after]
    if any(_order(path)[0] <= after for path in newer):
        raise StoreError(f"{newer[0]}: does not end at epoch {after}, after which this run continues; move it manually")
    return newer


def move_aside(
    run: Path, files: Sequence[Path], name: str, cuts: Sequence[Cut] = (), shared: Sequence[Path] = ()
) -> None:
    """Move files of a run, and rows of files, to a new folder `aside/<name>/`. Nothing is deleted.

    Files in `shared`, which files that stay also need, are linked or copied to a subfolder named like their folder.

    Raises StoreError.
    """
    if not files and not cuts:
        return
    try:
        aside = _make_fresh(inside(run, ASIDE) / name)
        for cut in cuts:  # write the moved rows before they are removed here
            write_whole(aside / cut.path.name, cut.moves)
            if cut.stays is None:
                cut.path.unlink()
            else:
                write_whole(cut.path, cut.stays)
        for path in shared:  # before the files that need them
            (aside / path.parent.name).mkdir(exist_ok=True)
            _link(path, aside / path.parent.name / path.name)
        for path in files:
            same = (aside / path.name).exists()  # the best checkpoint may have the name of another one
            path.rename(aside / (f"{path.parent.name}-{path.name}" if same else path.name))
        folders = {aside, aside.parent, run, *(path.parent for path in files)}
        for changed in folders | {aside / path.parent.name for path in shared}:
            sync_folder(changed)
    except OSError as error:
        raise StoreError(f"{run}: files newer than {name} cannot be moved aside: {reason_of(error)}") from error
    count = len(files) + len(cuts)
    logger.warning("%s: %d file(s) newer than %s were moved to %s", run, count, name, aside)


def _link(path: Path, other: Path) -> None:
    try:
        os.link(path, other)
    except OSError:  # some file systems have no hard links
        write_whole(other, read_file(path, LARGEST))


def _order(path: Path) -> tuple[int, int, int]:
    """Return first epoch, last epoch and part, as the name gives them."""
    match = _NAME.fullmatch(path.name)
    assert match is not None, path
    return int(match[1]), int(match[2] or match[1]), int(match[3] or 0)


def _make_fresh(path: Path) -> Path:
    """Create the first of the folders `path`, `path-2`, `path-3`, ... that does not exist."""
    make_folder(path.parent)
    names = itertools.chain([path.name], (f"{path.name}-{number}" for number in itertools.count(2)))
    while True:
        candidate = path.with_name(next(names))
        with contextlib.suppress(FileExistsError):
            candidate.mkdir()
            return candidate


def kept_by(run: Path) -> tuple[int, Any]:
    """Return `every` and `keep_best` of the store that wrote that run, from `run.json`. By default 1 and None."""
    store = parts_of(run).get("store")
    config = store.get("config") if isinstance(store, dict) else None
    if not isinstance(config, dict):
        return 1, None
    every = config.get("every", 1)
    return every if type(every) is int and every >= 0 else 1, config.get("keep_best")


def parts_of(run: Path) -> dict[str, Any]:
    """Return the parts of a run from its `run.json`, or an empty dictionary if it has none."""
    try:
        parts = read_json(run / "run.json")["parts"]
    except (OSError, ValueError, KeyError):
        return {}
    return parts if isinstance(parts, dict) else {}


class _Held(NamedTuple):
    """Folder that this process has locked."""

    key: tuple[int, int]  # device and inode
    descriptor: int
    locked: bool  # False on a file system that has no locks
    lock: weakref.ref[Lock]


_held: dict[tuple[int, int], _Held] = {}  # by key
_guard = threading.RLock()  # reentrant, because the garbage collector may release a lock at any line


class Lock:
    """Lock on the folder of a run. It creates no file and ends with the process.

    Two stores that continue one run would move each other's epochs aside. Windows and some network file systems have no
    such lock; only stores of one process exclude each other on the latter, and none on Windows.

    `give_up` closes the store when another store of this process needs the folder. It is set for a store that is not
    referenced any more, and for one whose run has ended or failed.

    Raises:
        StoreError: a store of this or another process has locked the folder.
    """

    def __init__(self, folder: Path) -> None:
        self.give_up: Callable[[], None] | None = None
        if fcntl is None:
            return
        descriptor = _open(folder)
        held = None
        try:
            status = os.fstat(descriptor)
            key = status.st_dev, status.st_ino
            _end_unused(key)
            with _guard:
                if key in _held:
                    advice = "call close() of that store first, or use another folder"
                    raise StoreError(f"{folder}: another store of this process is writing to it; {advice}")
                locked = _lock(descriptor)
                if locked is None:
                    advice = "end that process or use another folder"
                    raise StoreError(f"{folder}: another process is writing to it; {advice}")
                _held[key] = held = _Held(key, descriptor, locked, weakref.ref(self))
                self._release = weakref.finalize(self, _release, held)
        except BaseException:  # such as KeyboardInterrupt
            _release(held) if held is not None else os.close(descriptor)
            raise

    def release(self) -> None:
        """Release the lock. A second call does nothing."""
        if fcntl is not None:
            self._release()


def is_locked(folder: Path) -> bool:
    """Return whether a store of this or another process has locked the folder."""
    with _locked(folder) as locked:  # also fails if this process holds a lock through another descriptor
        return locked is None


@contextlib.contextmanager
def keep_stores_out(folder: Path) -> Iterator[None]:
    """Prevent stores of all processes from opening the folder. Raises StoreError if a store has it open."""
    with _locked(folder) as locked:
        if locked is None:
            raise StoreError(f"{folder}: a run is writing to it; try again when the run has ended")
        yield


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[bool | None]:
    """Lock a folder meanwhile. Yields the result of `_lock`, or False on Windows."""
    if fcntl is None:
        yield False
        return
    descriptor = _open(folder)
    try:
        locked = _lock(descriptor)
        try:
            yield locked
        finally:
            if locked:  # closing is not enough: a child process being started shares the descriptor
                fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        os.close(descriptor)


def _open(folder: Path) -> int:
    try:
        return os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise StoreError(f"{folder}: cannot be opened: {error.strerror}") from error


def _end_unused(key: tuple[int, int]) -> None:
    """Close a store of this process that gives up the folder."""
    if key in _held:
        gc.collect()
    lock = _held[key].lock() if key in _held else None
    if lock is not None and lock.give_up is not None:
        lock.give_up()
        lock.release()


def _lock(descriptor: int) -> bool | None:
    """Lock a folder. Returns None if it is already locked, and False on a file system without locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return None if error.errno in _TAKEN else False
    return True


def _release(held: _Held) -> None:
    with _guard:
        if _held.get(held.key) is not held:
            return  # the lock belongs to the parent of this fork
        del _held[held.key]
        try:
            if held.locked:  # closing is not enough: a child process being started shares the descriptor
                fcntl.flock(held.descriptor, fcntl.LOCK_UN)
        finally:
            os.close(held.descriptor)


def _forget() -> None:
    """Close the descriptors in a fork: the locks belong to the parent."""
    for held in _held.values():
        os.close(held.descriptor)
    _held.clear()
    _guard.release()


if fcntl is not None:
    os.register_at_fork(before=_guard.acquire, after_in_parent=_guard.release, after_in_child=_forget)
