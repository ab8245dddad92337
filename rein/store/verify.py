"""Verify a run or one file: hashes, layout, numbering, tables against rows, checkpoints, metrics."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rein.errors import StoreError
from rein.files import TEXT, followed, inside, open_file, read_json
from rein.store.checkpoint_file import read_checkpoint
from rein.store.checkpoint_folder import FOLDER as CHECKPOINTS
from rein.store.checkpoint_folder import saved_files
from rein.store.folder import TRAJECTORIES, epochs_of, first_epoch, list_files, missing_epochs, spans_of
from rein.store.format import sealed
from rein.store.format.state import TRAILER_LENGTH, find_texts
from rein.store.format.trajectory_reader import MISREAD, Content, open_content
from rein.store.lock import is_locked
from rein.store.metrics import EPOCHS, EVALUATIONS, PLOT, CSVTable, cells_of, columns_of, read_line
from rein.store.selection import kept_by
from rein.store.trajectory_checks import check_file, check_sequence

_KEYS = {EPOCHS: ("epoch", "status"), EVALUATIONS: ("evaluation", "name")}  # columns: number of the row, and text
_SCARCE = {errno.EMFILE, errno.ENFILE, errno.ENOMEM}  # limits of the process or machine, not problems of a file


class Problem(NamedTuple):
    """Problem of one file."""

    path: Path
    reason: str


class Report(NamedTuple):
    """Counts of the checked files, and the problems found."""

    files: int
    bytes: int
    epochs: int
    episodes: int
    problems: list[Problem]


def verify_run(path: str | Path) -> Report:
    """Check every file of the run in the folder `path`, or one file.

    Raises StoreError if there is no file to check, and if the system's limits prevent opening or mapping files.
    """
    path = followed(Path(path).expanduser())
    if path.is_dir():
        trajectories = list_files(inside(path, TRAJECTORIES)) or list_files(path)
        places = [inside(path, CHECKPOINTS, *names) for names in ((), ("best",))]
        checkpoints = [file for place in places for file in saved_files(place)]
        others = [path / name for name in ("run.json", EPOCHS, EVALUATIONS, PLOT) if os.path.lexists(path / name)]
    elif path.name in ("run.json", *_KEYS, PLOT):
        trajectories, checkpoints, others = [], [], [path]
    else:
        saved = path.is_file() and _is_checkpoint(path)
        trajectories, checkpoints, others = ([], [path], []) if saved else ([path] * path.is_file(), [], [])
    looked_at = [*trajectories, *checkpoints, *others]
    if not looked_at:
        raise StoreError(f"{path}: is neither the folder of a run nor a file of one")
    problems: list[Problem] = []
    contents = _check_trajectories(trajectories, problems)
    for file, content in contents.items():
        _guard(file, problems, lambda c=content: [Problem(c.file.path, wrong) for wrong in check_file(c)])
    known = list(contents.values())
    stride = _stride(path) if path.is_dir() else None
    if path.is_dir() and known:
        problems += [Problem(content.file.path, wrong) for content, wrong in check_sequence(known, stride)]
    if path.is_dir():
        _guard(path / EPOCHS, problems, lambda: list(_check_oldest(path, known, bool(checkpoints))))
    epochs = {number for content in known for number in content.epochs["number"].tolist()}
    last = max(epochs, default=0)
    for file in checkpoints:
        _guard(file, problems, lambda f=file: list(_check_checkpoint(f, epochs, stride)))
    for file in others:
        _guard(file, problems, lambda f=file: list(_check_other(f, last, first_epoch(path) if path.is_dir() else None)))
    if path.is_dir():
        _guard(path / CHECKPOINTS / "latest", problems, lambda: list(_check_latest(path / CHECKPOINTS)))
        if path / PLOT in others and path / EPOCHS not in others:
            problems.append(Problem(path / EPOCHS, f"is missing, but {PLOT} was made from it"))
    size = sum(file.lstat().st_size for file in looked_at if os.path.lexists(file))
    return Report(len(looked_at), size, len(epochs), sum(len(c.episodes["id"]) for c in known), problems)


def _guard(path: Path, problems: list[Problem], check: Callable[[], list[Problem]]) -> None:
    """Add the problems that `check` returns, and each error that the file may have caused.

    Raises StoreError if the system's limits prevent the check, which is not a problem of the file.
    """
    try:
        problems += check()
    except StoreError as error:
        if _is_scarce(error):
            raise
        problems.append(Problem(path, str(error).removeprefix(f"{path}: ")))
    except OSError as error:
        if _is_scarce(error):
            raise StoreError(f"{path}: cannot be checked: {sealed.reason_of(error)}") from error
        problems.append(Problem(path, f"cannot be read: {error.strerror}"))
    except (*MISREAD, MemoryError, OverflowError, RecursionError) as error:
        problems.append(Problem(path, f"has invalid content: {error!r:.300}"))


def _is_scarce(error: BaseException | None) -> bool:
    """Return whether an error, or one of its causes, reports a lack of descriptors, memory maps or memory."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _SCARCE:
            return True
        error = error.__cause__
    return False


def _check_trajectories(paths: Sequence[Path], problems: list[Problem]) -> dict[Path, Content]:
    """Return the files with correct hash, layout and tables. Add a problem for each other file."""
    found: dict[Path, Content] = {}
    for path in paths:
        _guard(path, problems, lambda p=path: _open(p, found))
    return found


def _open(path: Path, found: dict[Path, Content]) -> list[Problem]:
    found[path] = open_content(path)
    return []


def _is_checkpoint(path: Path) -> bool:
    """Return whether the last line of a file is that of a checkpoint.

    A damaged checkpoint may be taken for a trajectory file. It is reported as damaged in both cases.
    """
    try:
        with open_file(path) as file:
            file.seek(max(0, path.stat().st_size - TRAILER_LENGTH))
            find_texts(file.read(TRAILER_LENGTH))
        return True
    except (OSError, ValueError):
        return False


def _stride(run: Path) -> int | None:
    """Return `every` of the run's store, or None if the store keeps no epochs or the best ones."""
    every, best = kept_by(run)
    return every if every and best is None else None


def _check_oldest(run: Path, contents: Sequence[Content], saved: bool) -> Iterator[Problem]:
    """Check that no trajectory files are missing at the beginning, by `metrics.csv` or by steps and episode ids.

    A folder without trajectory files is not a problem while a store writes to it.
    """
    files = list_files(inside(run, TRAJECTORIES))
    epoch_K = CSVTable(run / EPOCHS).refresh().get("epoch", np.empty(0))
    where, last = (files[0], epochs_of(files[0])[0]) if files else (run / TRAJECTORIES, sys.maxsize)
    if lost := missing_epochs(run, epoch_K.tolist(), last):
        if files or not is_locked(run):
            be, those = ("is", "epoch") if len(lost) == 1 else ("are", "epochs")
            before = f"before epoch {last}" if files else "and there is no trajectory file"
            yield Problem(where, f"{those} {spans_of(lost)} of {EPOCHS} {be} missing {before}")
    elif saved and contents and _stride(run) == 1 and not (run / EPOCHS).exists():
        step, ids = int(contents[0].epochs["first_step"][0]), contents[0].episodes["id"]
        if step > 0 or (len(ids) and ids[0] > 0):
            start = f"begins with step {step}" + (f" and episode {ids[0]}" if len(ids) else "")
            yield Problem(where, f"{start}: earlier files are missing, or {EPOCHS}, which lists the first epoch")


def _check_checkpoint(path: Path, stored: Collection[int], stride: int | None) -> Iterator[Problem]:
    """Read the whole state, and check that the epochs on which its store relies exist."""
    parts = read_checkpoint(path).state.get("parts")
    store = parts.get("store") if isinstance(parts, dict) else None
    epoch, best = (store.get("epoch"), store.get("best")) if isinstance(store, dict) else (None, None)
    if type(epoch) is not int:
        return
    last = max(stored, default=0)
    if stride is not None and epoch - epoch % stride > last:
        yield Problem(path, f"needs epochs up to {epoch}, but the trajectories end with epoch {last}")
    if isinstance(best, list):
        lost = sorted({int(number) for number, _ in best[-1]} - {*stored})
        if len(lost) > sum(number > epoch for number in stored):  # each newer epoch may have displaced one
            yield Problem(path, f"needs epochs {spans_of(lost)}, which are missing from the trajectories")


def _check_latest(folder: Path) -> Iterator[Problem]:
    latest = folder / "latest"
    if os.path.lexists(latest):
        with open_file(latest) as file:
            name = file.read(200).decode(errors="replace").strip()
        if name not in [path.name for path in saved_files(folder)]:
            yield Problem(latest, f"names {name!r}, which does not exist")


def _check_other(path: Path, last: int, first: int | None) -> Iterator[Problem]:
    """Check a file of metrics or `run.json`.

    `first` is the first epoch of the run, `last` the last one of the trajectories, or 0 if they are not checked.
    """
    if path.name == PLOT:
        sealed.verify(path)
    elif path.name in _KEYS:
        first, last = (first, last) if path.name == EPOCHS else (None, 0)
        yield from (Problem(path, wrong) for wrong in _check_rows_of(path, *_KEYS[path.name], first, last))
    else:
        read_json(path)


def _check_rows_of(path: Path, key: str, text: str, first: int | None, last: int) -> Iterator[str]:
    """Yield the problems of a CSV file up to the first wrong line: invalid numbers, gaps, an incomplete last line.

    The rows must begin with `first` or earlier, if it is known, and end with `last` or later.
    """
    with open_file(path, limit=TEXT) as file:
        names = columns_of(read_line(file, path), path)
        if key not in names:
            yield f"has no column {key!r}"
            return
        before: int | None = None
        for number, line in enumerate(iter(lambda: read_line(file, path), b""), start=2):
            if not line.endswith(b"\n"):
                yield f"ends within line {number}, which the next start of the run removes"
                return
            if not (cells := cells_of(line)):
                yield f"line {number}: is damaged"
                return
            wrong = _check_row(dict(zip(names, cells, strict=False)), key, text, before)
            if len(cells) != len(names) or wrong:
                yield f"line {number}: {wrong or f'{len(cells)} cells of {len(names)}'}"
                return
            now = int(cells[names.index(key)])
            if before is None and first is not None and now > first:
                yield f"begins with {key} {now}, but the run begins with epoch {first}"
            before = now
        if (before or 0) < last:
            yield f"ends with {key} {before or 0}, but the trajectories end with epoch {last}"


def _check_row(row: dict[str, Any], key: str, text: str, before: int | None) -> str | None:
    for name, cell in row.items():
        try:
            _ = float(cell) if cell and name != text else None
        except ValueError:
            return f"{cell!r:.40} is not a number"
    if not row.get(key, "").isdecimal():
        return f"{row.get(key)!r:.40} is not a valid {key}"
    if before is not None and int(row[key]) != before + 1:
        return f"{key} {row[key]} comes after {key} {before}"
    return None
