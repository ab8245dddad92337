"""Many small trajectory files into few, without a moment at which an epoch is missing or there twice.

A file that replaces others is written whole and read back before anything is removed, and says which ones it replaces
(`rein.store.replaced`): from its rename on they no longer count. Its epochs are equal to theirs, bit for bit. Files of
other fields, types or configurations stay apart, and so do epochs before and after a checkpoint, from which a run may
be resumed.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np

from rein.errors import CheckpointError, StoreError
from rein.files import inside
from rein.ops.trees import leaves
from rein.store.checkpoint import look, read_checkpoint
from rein.store.checkpoints import BEST
from rein.store.checkpoints import FOLDER as CHECKPOINTS
from rein.store.contents import MISREAD, read_contents
from rein.store.folder import TRAJECTORIES, file_name, list_files, remove_replaced
from rein.store.format.files import open_sealed, reason_of, remove_leftovers, sync_folder, write_whole
from rein.store.format.image import Memory, compose
from rein.store.format.layout import WHOLE, write_trajectories
from rein.store.format.scan import Stored
from rein.store.format.tables import Content, take_rows
from rein.store.lock import Lock
from rein.store.pieces import read_epoch
from rein.store.replaced import say_replaced
from rein.store.selection import kept_by
from rein.types import Trajectory

MAX_BYTES = 64 << 20  # of data in a file, before compression
MAX_EPOCHS = 1000  # in a file, as a store has it


class Compacted(NamedTuple):
    """Number and bytes of the trajectory files before and after."""

    files_before: int
    bytes_before: int
    files: int
    bytes: int


class _Unit(NamedTuple):
    """What is kept together: one file, or all the parts of an epoch."""

    contents: list[Content]
    size: int
    kind: tuple[Any, ...]  # fields, next and final observations, run.json; files whose kinds are equal may be joined

    @property
    def epochs(self) -> int:
        return len(self.contents[0].epochs["number"])  # several contents are parts of one epoch

    @property
    def last(self) -> int:
        return int(self.contents[-1].epochs["number"][-1])


def compact(path: str | Path, max_bytes: int = MAX_BYTES, max_epochs: int = MAX_EPOCHS) -> Compacted:
    """Join the trajectory files of the run in the folder `path`, up to `max_bytes` of data and `max_epochs` in a file.

    Raises StoreError where a run is writing to the folder, where a file is damaged, and where the disk is full; what
    was joined until then stays so.
    """
    path = Path(path).expanduser()
    folder = inside(path, TRAJECTORIES)
    if not folder.is_dir():
        raise StoreError(f"{path}: has no {TRAJECTORIES}/; give the folder of a run")
    lock = Lock(path, alone=True)
    try:
        remove_leftovers(folder)
        remove_replaced(folder)
        before = _measure(folder)
        alone = kept_by(path)[1] is not None  # each may lose its place to a better one
        units = list(_units(read_contents(list_files(folder))))
        for group in list(_groups(units, _borders(path), (max_bytes, max_epochs), alone)):
            _join(folder, group)
        return Compacted(*before, *_measure(folder))
    except OSError as error:
        raise StoreError(f"{path}: cannot be compacted: {reason_of(error)}") from error
    finally:
        lock.release()


def _units(contents: Sequence[Content]) -> Iterator[_Unit]:
    """The files, the parts of an epoch together; one of which a part is missing stays as it is."""
    for (_, total), group in itertools.groupby(contents, lambda c: (int(c.epochs["number"][0]), c.epochs["parts"][0])):
        parts = list(group)
        if len(parts) == total:
            yield _Unit(parts, sum(map(_size, parts)), _kind(parts))


def _groups(units: Sequence[_Unit], borders: set[int], limits: tuple[int, int], alone: bool) -> Iterator[list[Content]]:
    """Files that follow each other and become one, up to so many bytes and epochs.

    Where they are to stay `alone`, that is the parts of one epoch only.
    """
    max_bytes, max_epochs = limits
    group: list[_Unit] = []
    for unit in units:
        apart = bool(group) and (
            alone
            or not _fits(group, unit)
            or sum(other.size for other in group) + unit.size > max_bytes
            or sum(other.epochs for other in group) + unit.epochs > max_epochs
            or any(group[-1].last <= border < unit.last for border in borders)
        )
        if apart:
            yield from _worthwhile(group, max_bytes)
            group = []
        group.append(unit)
    yield from _worthwhile(group, max_bytes)


def _worthwhile(group: Sequence[_Unit], max_bytes: int) -> Iterator[list[Content]]:
    contents = [content for unit in group for content in unit.contents]
    if len(contents) > 1 and sum(unit.size for unit in group) <= max_bytes:
        yield contents


def _fits(group: Sequence[_Unit], unit: _Unit) -> bool:
    *mine, final = unit.kind
    known = next((other.kind[-1] for other in group if other.kind[-1] is not None), None)  # all that have one agree
    return list(group[0].kind[:-1]) == mine and (None in (final, known) or final == known)


def _join(folder: Path, contents: Sequence[Content]) -> None:
    """Write the file that replaces these, and remove them."""
    paths = [content.file.path for content in contents]
    epochs, run = list(_epochs(contents)), _run_text(contents[0])
    target = folder / file_name(epochs[0].epoch, epochs[-1].epoch, WHOLE)
    if target.exists():
        command = f"rein verify {shlex.quote(str(folder.parent))}"
        raise StoreError(f"{target}: is there already, with other epochs; look at it with `{command}`")

    def build(file: h5py.File) -> None:
        write_trajectories(file, epochs, run=run)

    size = sum(map(_size, contents))
    write_whole(target, compose(build, Memory(), capacity=size, trailer=lambda: say_replaced(paths)))
    written = read_contents([target])
    count = len(written[0].epochs["number"])
    if count != len(epochs) or not all(map(_is_same, epochs, _epochs(written))):
        target.unlink()
        raise StoreError(f"{target}: was not read back as it was written; the files that it was to replace are kept")
    for path in paths:
        path.unlink()
    sync_folder(folder)


def _epochs(contents: Sequence[Content]) -> Iterator[Trajectory]:
    rows = [
        take_rows(content.epochs, index) | {"file": number, "index": index}
        for number, content in enumerate(contents)
        for index in range(len(content.epochs["number"]))
    ]
    for _, parts in itertools.groupby(rows, lambda row: int(row["number"])):
        yield read_epoch(contents, list(parts), contents[0].file.path)


def _is_same(one: Trajectory, other: Trajectory) -> bool:
    """Whether the second is the first to the bit; it may have more metrics, which are NaN."""
    for name in ("metrics", "clocks"):
        mine, theirs = getattr(one, name), getattr(other, name)
        if any(repr(value) != repr(theirs.get(key)) for key, value in mine.items()):
            return False
    a, b = (dict(leaves(t._replace(metrics={}, clocks={}))) for t in (one, other))
    return a.keys() == b.keys() and all(_bits(leaf) == _bits(b[path]) for path, leaf in a.items())


def _bits(leaf: Any) -> Any:
    return (leaf.dtype, leaf.shape, leaf.tobytes()) if isinstance(leaf, np.ndarray) else leaf


def _stored(node: Any, path: str = "") -> Iterator[tuple[str, Stored]]:
    if isinstance(node, Stored):
        yield path, node
    for name, child in node.items() if isinstance(node, dict) else ():
        yield from _stored(child, f"{path}/{name}")


def _size(content: Content) -> int:
    return sum(math.prod(s.shape) * s.dtype.itemsize for _, s in _stored(content.file.layout))


def _kind(contents: Sequence[Content]) -> tuple[Any, ...]:
    def of(content: Content, skip: int, *path: str) -> Any:
        node = content.file.node(*path)
        return node if node is None else {p: (s.dtype, s.shape[skip:]) for p, s in _stored(node)}

    first = contents[0]
    ended = next((content for content in contents if len(content.episodes["id"])), None)
    final = ended and of(ended, 1, "episodes", "final_observation")
    following = of(first, 1, "epochs", "next_observation")
    return of(first, 1, "trajectory"), following, _run_text(first), final


def _run_text(content: Content) -> str | None:
    """The `run.json` that a file carries; HDF5 has parsed the file in a child process before."""
    try:
        with open_sealed(content.file.path, verified=True) as file:
            entry: Any = file["entry"]
            if "run" not in entry:
                return None
            data: Any = entry
            for name in ("run", "data"):
                if not isinstance(data.get(name, getlink=True), h5py.HardLink):
                    return None  # it would lead to another file
                data = data[name]
            return None if data.is_virtual or data.external else data[()].decode()
    except (*MISREAD, OSError, RuntimeError) as error:
        raise StoreError(f"{content.file.path}: what it says of its run cannot be read: {error!s:.200}") from error


def _borders(path: Path) -> set[int]:
    """The epochs after which a checkpoint stands: one of this run, or, where it is in a run's folder, of that one."""
    said = [about.get("epochs_ended") for file in _checkpoints(path) if (about := look(file)) is not None]
    for file in _checkpoints(path.parent):
        with contextlib.suppress(CheckpointError):
            parts = read_checkpoint(file).state.get("parts")
            stores = parts.values() if isinstance(parts, dict) else ()
            said += [store.get("epoch") for store in stores if isinstance(store, dict)]
    return {epochs for epochs in said if type(epochs) is int}


def _checkpoints(run: Path) -> list[Path]:
    return [file for folder in ((), (BEST,)) for file in inside(run, CHECKPOINTS, *folder).glob("*.h5")]


def _measure(folder: Path) -> tuple[int, int]:
    files = list_files(folder)
    return len(files), sum(file.lstat().st_size for file in files)
