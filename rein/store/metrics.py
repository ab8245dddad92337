"""Write and read the metrics in the folder of a run.

Files::

    runs/<name>/
      metrics.csv         one row per ended epoch, appended
      evaluations.csv     one row per evaluation, appended
      metrics.h5          both tables, opens with the learning curve; rewritten from time to time
"""

from __future__ import annotations

import csv
import itertools
import logging
import math
import os
import sys
import time
from array import array
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np

from rein.errors import StoreError
from rein.files import TEXT, inside, is_regular, open_file, read_file
from rein.loop import Loop
from rein.loop.state import State
from rein.store.checkpoint_folder import FOLDER as CHECKPOINTS
from rein.store.folder import TRAJECTORIES, Cut, first_epoch, list_files, missing_epochs, move_aside, spans_of
from rein.store.format.sealed import compose, write_whole
from rein.store.format.views import write_learning_curves
from rein.store.selection import parts_of

_SECONDS = 10.0  # minimum seconds between two writes of metrics.h5
_SHARE = 0.01  # maximum share of the run time spent on writing it

EPOCHS, EVALUATIONS, PLOT = "metrics.csv", "evaluations.csv", "metrics.h5"

_TEXT = {EPOCHS: "status", EVALUATIONS: "name"}  # the text column of each file
# Limits of a file that is read
_LINE = 1 << 20  # bytes
_COLUMNS = 10_000
_CELLS = 1 << 27  # of all lines, 1 GiB as numbers
_WORD = 100  # characters of a cell in the text column

logger = logging.getLogger("rein")


class RowWriter(Protocol):
    """Protocol of objects that write rows, such as `rein.handlers.loggers.csv.CSVLogger`."""

    def append(self, row: Mapping[str, float | int | str | None]) -> None:
        """Append one row."""
        ...

    def flush(self) -> None:
        """Wait until all rows are safe on the disk."""
        ...

    def close(self) -> None:
        """Flush and close the file. The next row opens it again."""
        ...


class RunMetrics:
    """Writes a row for every epoch and evaluation of a loop to the folder `run`.

    This part of a loop has no state: the loop's counts decide which rows belong to the run, and a checkpoint flushes
    the files. Errors never affect the run. A file that cannot be written is reported once and then no longer written.
    """

    def __init__(self, run: Path, epochs: RowWriter, evaluations: RowWriter) -> None:
        """`epochs` writes the rows of `metrics.csv` in `run`, and `evaluations` those of `evaluations.csv`."""
        self._run = run
        self._rows = {EPOCHS: epochs, EVALUATIONS: evaluations}
        self._tables = CSVTable(run / EPOCHS), CSVTable(run / EVALUATIONS)
        self._changed = False  # whether rows were added since metrics.h5 was written
        self._written_at, self._cost = time.monotonic(), 0.0
        self._observes = False
        self._warned: set[Path] = set()  # files whose gaps were reported
        self._failed: set[str] = set()  # files that are no longer written

    @property
    def config(self) -> dict[str, Any]:
        """Configuration: empty."""
        return {}

    def attach(self, loop: Loop) -> None:
        """Record the epochs and evaluations of `loop`."""

        @loop.started.wire
        def begin(state: State) -> None:
            self._guarded(EPOCHS, self._begin, state)
            if "evaluation_completed" in loop.events and not self._observes:
                loop.events["evaluation_completed"].wire(add_evaluation)
                self._observes = True
            loop.cleanups.append(self.close)

        @loop.epoch_ended.wire
        def ask(state: State) -> None:
            state.request(add_epoch)  # runs after all handlers, which may add metrics or fail

        def add_epoch(state: State) -> None:
            if state.epoch_open:  # the end of the epoch was interrupted; the next run repeats it
                return
            record = state.history[-1]
            self._add_epoch(record.epoch, record.status, state.clocks.as_dict(), record.metrics)

        def add_evaluation(state: State) -> None:
            self._guarded(EVALUATIONS, self._add_evaluation, state)

    def flush(self) -> None:
        """Wait until all rows are safe on the disk. Rewrites `metrics.h5` unless it was just written."""
        for name, rows in self._rows.items():
            self._guarded(name, rows.flush)
        self._plot_if(self._is_due(0.0))

    def close(self) -> None:
        """Write all rows and `metrics.h5`, and close the files. The next row opens them again."""
        self._plot_if(True)
        for name, rows in self._rows.items():
            self._guarded(name, rows.close)

    def _begin(self, state: State) -> None:
        """Move newer rows of an earlier run aside, and mark `metrics.h5` as outdated if it is missing."""
        files, cuts = newer_rows(self._run, state.clocks.epochs, evaluations_of(state.memory))
        move_aside(self._run, files, f"epoch-{state.clocks.epochs:06d}", cuts)
        self._tables = CSVTable(self._run / EPOCHS), CSVTable(self._run / EVALUATIONS)
        rows = self._tables[0].refresh()
        self._warn_of_gaps(rows.get("epoch", np.empty(0)), state.clocks.epochs)
        self._changed = bool(rows) and not (self._run / PLOT).exists()
        self._written_at = time.monotonic()

    def _warn_of_gaps(self, epoch_K: np.ndarray, epochs: int) -> None:
        """Warn once about missing rows and trajectories of earlier epochs."""
        folders = [self._run / name for name in (TRAJECTORIES, CHECKPOINTS)]
        is_fresh = not len(epoch_K) and not any(path for folder in folders for path in folder.glob("*.h5"))
        first = first_epoch(self._run) or min(epoch_K, default=epochs + 1)
        absent = np.setdiff1d(np.arange(first, epochs + 1), epoch_K)
        if not is_fresh:
            self._warn_once(self._run / EPOCHS, "row", absent.tolist(), epochs)
        lost = missing_epochs(self._run, epoch_K.tolist(), epochs)
        self._warn_once(self._run / TRAJECTORIES, "trajectory", lost, epochs)

    def _warn_once(self, path: Path, kind: str, absent: list[int], epochs: int) -> None:
        if absent and path not in self._warned:
            self._warned.add(path)
            missing = f"has no {kind} of epoch{'s' * (len(absent) > 1)} {spans_of(absent)}"
            logger.warning("%s: %s; the run continues after epoch %d without", path, missing, epochs)

    def _add_epoch(self, epoch: int, status: str, clocks: Mapping[str, float], metrics: Mapping[str, float]) -> None:
        self._guarded(EPOCHS, self._append_epoch, epoch, status, clocks, metrics)
        self._changed = True
        self._plot_if(self._is_due(_SECONDS))

    def _append_epoch(self, epoch: int, status: str, clocks: Mapping[str, float], metrics: Mapping[str, float]) -> None:
        row: dict[str, Any] = {"epoch": epoch, "status": status, **_clock_columns(clocks)}
        row |= {f"{name}_metric" if name in row else name: value for name, value in metrics.items()}
        self._rows[EPOCHS].append(row)

    def _add_evaluation(self, state: State) -> None:
        found: Mapping[str, Any] = state.memory["evaluations"]
        row = {"evaluation": found["number"], "name": found["name"], "epoch": state.evaluation.epoch}
        row |= _clock_columns(state.evaluation.clocks)  # the column `episodes` counts training episodes
        row |= {"return": found["return"], "length": found["length"], "played": found["episodes"]}
        row |= {name: value for name, value in found.items() if name.startswith(("return_", "success_"))}
        self._rows[EVALUATIONS].append(row)

    def _is_due(self, seconds: float) -> bool:
        return time.monotonic() - self._written_at >= max(seconds, self._cost / _SHARE)

    def _plot_if(self, due: bool) -> None:
        if due and self._changed:
            self._guarded(PLOT, self._plot)

    def _plot(self) -> None:
        began = time.monotonic()
        epochs, evaluations = (table.refresh() for table in self._tables)
        write_whole(self._run / PLOT, compose(lambda file: write_learning_curves(file, epochs, evaluations)))
        self._changed, self._written_at = False, time.monotonic()
        self._cost = self._written_at - began

    def _guarded(self, name: str, call: Callable[..., None], *arguments: Any) -> None:
        if name in self._failed:
            return
        try:
            call(*arguments)
        except (StoreError, OSError) as error:
            self._failed.add(name)
            path, reason = self._run / name, str(error).removeprefix(f"{self._run / name}: ")
            logger.error("%s: is no longer written; the run continues: %s", path, reason)
        except Exception:  # errors of these files must not end the run
            self._failed.add(name)
            logger.exception("%s: is no longer written; the run continues", self._run / name)


def _clock_columns(clocks: Mapping[str, float]) -> dict[str, float]:
    """Return the clocks without `epochs`, which is the column `epoch`."""
    return {name: round(value, 6) for name, value in clocks.items() if name != "epochs"}


class CSVTable:
    """Columns of a growing CSV file. `refresh` reads the rows that were appended since the last call.

    A missing file has no columns. An incomplete last line is left for the next call. An invalid number in a cell, for
    example after manual edits, reads as NaN. Raises StoreError for a file with too long lines or too many columns.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: tuple[int, int] | None = None  # device and inode of the file that was read
        self._header = b""
        self._position = 0
        self._columns: dict[str, Any] = {}  # name -> array of numbers, or list of texts

    def refresh(self) -> dict[str, np.ndarray]:
        """Return all columns: arrays of float64, or of bytes for the text column."""
        if not is_regular(self._path):
            return {}
        with open_file(self._path, limit=TEXT) as file:
            status, header = os.fstat(file.fileno()), read_line(file, self._path)
            same = (status.st_dev, status.st_ino) == self._file and status.st_size >= self._position
            if not same or header != self._header:  # the file was replaced, for example to add a column
                names = columns_of(header, self._path) if header.endswith(b"\n") else []
                self._file = status.st_dev, status.st_ino
                self._header, self._position = header, len(header)
                self._columns = {name: [] if name == _TEXT.get(self._path.name) else array("d") for name in names}
            file.seek(self._position)
            while (line := read_line(file, self._path)).endswith(b"\n"):
                self._position += len(line)
                if line.strip():
                    self._add(cells_of(line))
        return {name: _as_numpy(column) for name, column in self._columns.items()}

    def _add(self, cells: list[str]) -> None:
        rows = len(next(iter(self._columns.values()), ()))
        if rows * len(self._columns) >= _CELLS:
            raise StoreError(f"{self._path}: has more than {_CELLS:,} cells")
        for column, cell in itertools.zip_longest(self._columns.values(), cells[: len(self._columns)]):
            column.append(_number(cell) if isinstance(column, array) else sys.intern((cell or "")[:_WORD]))


def keeps_none(path: Path) -> bool:
    """Return whether `path` is the folder of a run without trajectories."""
    return (path / "run.json").is_file() and not list_files(inside(path, TRAJECTORIES))


def awaits_epoch(path: Path) -> bool:
    """Return whether `path` is the folder of a run that stores its epochs, and none has ended yet."""
    return keeps_none(path) and "metrics_files" in parts_of(path) and not (path / EPOCHS).is_file()


def evaluations_of(memory: Any) -> int:
    """Return the number of evaluations in `memory` of a run's state, which may come from a file."""
    latest = memory.get("evaluations") if isinstance(memory, Mapping) else None
    number = latest.get("number") if isinstance(latest, Mapping) else None
    return number if type(number) is int else 0


def newer_rows(run: Path, epochs: int, evaluations: int) -> tuple[list[Path], list[Cut]]:
    """Return the files and rows that a run with these counts of epochs and evaluations must move aside.

    `metrics.h5` is moved along with any row because it shows the row. Damaged rows, without a number in the column that
    counts them, are moved too. A file without that column is moved completely.
    """
    limits = {EPOCHS: ("epoch", epochs), EVALUATIONS: ("evaluation", evaluations)}
    cuts = [cut for name, (key, last) in limits.items() for cut in _cut(run / name, key, last)]
    plot = run / PLOT
    return [plot] if cuts and plot.is_file() else [], cuts


def _cut(path: Path, key: str, last: int) -> Iterator[Cut]:
    """Yield the cut that moves the rows that are damaged or whose `key` is above `last`, if there are any."""
    try:
        content = read_file(path) if is_regular(path) else b""
    except OSError as error:
        raise StoreError(f"{path}: cannot be read: {error.strerror}") from error
    lines = [line for line in content.splitlines(keepends=True) if line.strip() and line.endswith(b"\n")]
    header, *rows = lines or [b""]
    if not rows:
        return
    names = cells_of(header)
    if key not in names:
        logger.warning("%s: has no column %r; the whole file is moved aside", path, key)
        yield Cut(path, None, content)
        return
    numbers = [_count(cells_of(row), names.index(key)) for row in rows]
    if damaged := numbers.count(None):
        logger.warning("%s: moving %d damaged row(s) without a number in the column %r aside", path, damaged, key)
    newer = [number is None or number > last for number in numbers]
    if any(newer):
        stays = [row for row, goes in zip(rows, newer, strict=True) if not goes]
        moves = [row for row, goes in zip(rows, newer, strict=True) if goes]
        yield Cut(path, b"".join([header, *stays]) if stays else None, b"".join([header, *moves]))


def read_line(file: BinaryIO, path: Path) -> bytes:
    """Read the next line of a CSV file. Raises StoreError if it is too long."""
    line = file.readline(_LINE + 1)
    if len(line) > _LINE:
        raise StoreError(f"{path}: has a line of more than {_LINE:,} bytes")
    return line


def columns_of(header: bytes, path: Path) -> list[str]:
    """Return the names in the first line of a CSV file. Raises StoreError if there are too many."""
    names = cells_of(header)
    if len(names) > _COLUMNS:
        raise StoreError(f"{path}: has {len(names):,} columns; at most {_COLUMNS:,} are read")
    return names


def cells_of(line: bytes) -> list[str]:
    """Return the cells of a line of a CSV file; none if it has a NUL, is too long, or has a cell that is too long."""
    if b"\0" in line or len(line) > _LINE:
        return []
    try:
        return next(csv.reader([line.decode(errors="replace")]), [])
    except csv.Error:
        return []


def _count(cells: list[str], column: int) -> int | None:
    try:
        return int(cells[column])
    except (ValueError, IndexError):
        return None


def _number(cell: str | None) -> float:
    try:
        return float(cell or "nan")
    except ValueError:
        return math.nan


def _as_numpy(column: Any) -> np.ndarray:
    return np.array(column) if isinstance(column, array) else np.array([text.encode() for text in column])
