"""The folder of a run: whose it is, which trajectory files are in it, and what is moved aside.

runs/<name>/
  trajectories/000001-000128.h5       epochs 1 to 128
  trajectories/000129-part-02.h5      the second part of epoch 129, too large for one file
  aside/epoch-000100/                 what is newer than the checkpoint that a resumed run went on from
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
from rein.files import LARGEST, inside, read_file
from rein.store.format.sealed import reason_of, remove_leftovers, sync_folder, write_whole
from rein.store.format.trajectory_writer import Part
from rein.store.selection import kept_by

TRAJECTORIES, ASIDE = "trajectories", "aside"

_NAME = re.compile(r"(\d{6,18})-(?:(\d{6,18})|part-(\d{2,9}))\.h5")

logger = logging.getLogger(__name__)


class Cut(NamedTuple):
    """A file of rows, some of which are to be moved."""

    path: Path
    stays: bytes | None  # what the file shall be; None where nothing of it stays
    moves: bytes  # the others, a file of the same kind


def file_name(first: int, last: int, part: Part) -> str:
    """The name of the file of those epochs, or of a part of the first."""
    return f"{first:06d}-{last:06d}.h5" if part.total == 1 else f"{first:06d}-part-{part.number:02d}.h5"


def list_files(folder: Path) -> list[Path]:
    """Return the trajectory files in a folder, ordered by epoch and part."""
    found = [path for path in folder.iterdir() if _NAME.fullmatch(path.name)] if folder.is_dir() else []
    return sorted(found, key=_order)


def files_of(folder: Path, epoch: int) -> list[Path]:
    """The files that hold that epoch and no other: one, its parts, or none."""
    return [path for path in list_files(folder) if _order(path)[:2] == (epoch, epoch)]


def is_whole(folder: Path, epoch: int) -> bool:
    """Whether that epoch is in files of its own. Parts of it are removed from the first one on."""
    found = files_of(folder, epoch)
    return bool(found) and _order(found[0])[2] <= 1


def claim(path: Path, exist: str) -> Path:
    """Make the folder of a run, and clear it of what dead processes left; returns the folder that was taken.

    `exist` says what to do about one that is there: see `HDF5Store`. Raises StoreError.
    """
    if exist not in ("error", "resume", "new"):
        raise ValueError(f"exist={exist!r}: give 'error', 'resume' or 'new'")
    try:
        if path.is_file():
            raise StoreError(f"{path}: is a file, and a store needs a folder; give another path, such as runs/mine")
        if exist == "error" and path.exists() and not (path.is_dir() and not any(path.iterdir())):
            raise StoreError(f"{path}: exists; exist='resume' goes on with it, exist='new' takes the next free name")
        folder = _make_fresh(path) if exist == "new" else path
        inside(folder, TRAJECTORIES).mkdir(parents=True, exist_ok=True)
        for changed in (folder.parent, folder):
            sync_folder(changed)
        aside = [path for path in inside(folder, ASIDE).glob("*") if not path.is_symlink()]
        places = (folder, folder / TRAJECTORIES, *aside)
        removed = [path for place in places for path in remove_leftovers(place)]
    except OSError as error:
        raise StoreError(f"{path}: cannot be made or entered: {reason_of(error)}") from error
    if folder != path:
        logger.warning("%s exists; this run goes to %s", path, folder)
    if removed:
        logger.warning("%s: removed %d unfinished file(s) of processes that are gone", folder, len(removed))
    return folder


def first_epoch(run: Path) -> int | None:
    """The first epoch that ended in that folder, a later one of a run begun elsewhere; None where nobody can tell."""
    every, best = kept_by(run)
    files = [_order(path)[0] for path in list_files(inside(run, TRAJECTORIES))]
    if best is not None or not files:
        return None
    return min(files) if min(files) > every else 1


def epochs_of(path: Path) -> tuple[int, int]:
    """Return the first and the last epoch of a trajectory file, by its name."""
    return _order(path)[:2]


def missing_epochs(run: Path, epochs: Iterable[float], last: int) -> list[int]:
    """Return the epochs among `epochs`, up to `last`, that the store keeps and that no trajectory file holds.

    Looks at the names of the files only. A store that keeps the best epochs may have dropped any.
    """
    every, best = kept_by(run)
    if best is not None or not every:
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
    """The trajectory files with epochs newer than `after`. Raises StoreError where one has older ones as well."""
    newer = [path for path in list_files(inside(run, TRAJECTORIES)) if _order(path)[1] > after]
    if any(_order(path)[0] <= after for path in newer):
        raise StoreError(f"{newer[0]}: does not end at epoch {after}, where this run goes on; move it away by hand")
    return newer


def move_aside(
    run: Path, files: Sequence[Path], name: str, cuts: Sequence[Cut] = (), shared: Sequence[Path] = ()
) -> None:
    """Move files of a run, and rows of files, to a fresh folder `aside/<name>/`; nothing is deleted.

    What is `shared` with files that stay is there afterwards too, in a folder of the name that it is in.

    Raises StoreError.
    """
    if not files and not cuts:
        return
    try:
        aside = _make_fresh(inside(run, ASIDE) / name)
        for cut in cuts:  # first there, then no longer here
            write_whole(aside / cut.path.name, cut.moves)
            if cut.stays is None:
                cut.path.unlink()
            else:
                write_whole(cut.path, cut.stays)
        for path in shared:  # before those that need it
            (aside / path.parent.name).mkdir(exist_ok=True)
            _link(path, aside / path.parent.name / path.name)
        for path in files:
            same = (aside / path.name).exists()  # the best checkpoint may be among the others, too
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
    except OSError:  # not every file system has links
        write_whole(other, read_file(path, LARGEST))


def _order(path: Path) -> tuple[int, int, int]:
    """First epoch, last epoch and part, by the name."""
    match = _NAME.fullmatch(path.name)
    assert match is not None, path
    return int(match[1]), int(match[2] or match[1]), int(match[3] or 0)


def _make_fresh(path: Path) -> Path:
    """Make the folder `path`, or `path-2`, `path-3`, ...: the first that is not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    names = itertools.chain([path.name], (f"{path.name}-{number}" for number in itertools.count(2)))
    while True:
        candidate = path.with_name(next(names))
        with contextlib.suppress(FileExistsError):
            candidate.mkdir()
            return candidate
