"""The folder of a run: create it, list its trajectory files, and move files aside.

Layout::

    runs/<name>/
      trajectories/000001-000128.h5     epochs 1 to 128
      trajectories/000129-part-02.h5    second part of epoch 129, which is too large for one file
      aside/epoch-000100/               files newer than the checkpoint from which a run was resumed
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import logging
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from rein.errors import StoreError
from rein.files import LARGEST, inside, make_folder, read_file
from rein.store.format.sealed import reason_of, remove_leftovers, sync_folder, write_whole
from rein.store.format.trajectory_writer import Part
from rein.store.selection import kept_by, parts_of

TRAJECTORIES, ASIDE = "trajectories", "aside"

_NAME = re.compile(r"(\d{6,18})-(?:(\d{6,18})|part-(\d{2,9}))\.h5")

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
    found = [path for path in folder.iterdir() if _NAME.fullmatch(path.name)] if folder.is_dir() else []
    return sorted(found, key=_order)


def files_of(folder: Path, epoch: int) -> list[Path]:
    """Return the files that hold only this epoch: one file, its parts, or none."""
    return [path for path in list_files(folder) if _order(path)[:2] == (epoch, epoch)]


def is_whole(folder: Path, epoch: int) -> bool:
    """Return whether an epoch is complete in separate files. A partly removed epoch lacks its first part."""
    found = files_of(folder, epoch)
    return bool(found) and _order(found[0])[2] <= 1


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
    found = []
    for epoch in sorted({int(number) for number in epochs if number == number and number <= last}):
        before = bisect.bisect_right(spans, epoch, key=lambda span: span[0])
        if epoch % every == 0 and (before == 0 or ends[before - 1] < epoch):
            found.append(epoch)
    return found


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
        for changed in {
            aside,
            aside.parent,
            run,
            *(path.parent for path in files),
            *(aside / path.parent.name for path in shared),
        }:
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
