"""Read the metrics in the folder of a run, and find the rows that a resumed run writes again.

Files::

    runs/<name>/
      metrics.csv         one row per ended epoch, appended
      evaluations.csv     one row per evaluation, appended
      metrics.h5          both tables, opens with the learning curve; rewritten from time to time

`rein.handlers.record_metrics` writes them.
"""

from __future__ import annotations

import csv
import itertools
import logging
import math
import os
import sys
from array import array
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from rein.errors import StoreError
from rein.files import TEXT, inside, is_regular, open_file, read_file
from rein.store.folder import TRAJECTORIES, Cut, list_files, parts_of

EPOCHS, EVALUATIONS, PLOT = "metrics.csv", "evaluations.csv", "metrics.h5"

_TEXT = {EPOCHS: "status", EVALUATIONS: "name"}  # the text column of each file
# Limits of a file that is read
_LINE = 1 << 20  # bytes
_COLUMNS = 10_000
_CELLS = 1 << 27  # of all lines, 1 GiB as numbers
_WORD = 100  # characters of a cell in the text column

logger = logging.getLogger("rein")


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
        return {
            name: np.array(column if isinstance(column, array) else [text.encode() for text in column])
            for name, column in self._columns.items()
        }

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
