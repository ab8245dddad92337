"""The CSV files in a run's folder, read back: their columns, and which of their rows are newer than a checkpoint."""

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
from typing import Any

import numpy as np

from rein.errors import StoreError
from rein.files import TEXT, is_regular, open_file, read_file
from rein.store.folder import Cut

EPOCHS, EVALUATIONS, PLOT = "metrics.csv", "evaluations.csv", "metrics.h5"

_TEXT = {EPOCHS: "status", EVALUATIONS: "name"}  # the column of each that holds no numbers

logger = logging.getLogger("rein")


class Table:
    """The columns of a file that grows; `refresh` reads what was appended since the last time.

    A file that is not there has no columns; a torn last line is left for the next time. A cell that should hold a
    number and does not, for somebody may have edited the file, is NaN.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: tuple[int, int] | None = None  # which file was read
        self._header = b""
        self._position = 0
        self._columns: dict[str, Any] = {}  # name -> array of numbers, or list of texts

    def refresh(self) -> dict[str, np.ndarray]:
        """Every column: float64, or bytes where it holds text."""
        if not is_regular(self._path):
            return {}
        with open_file(self._path, limit=TEXT) as file:
            status, header = os.fstat(file.fileno()), file.readline()
            same = (status.st_dev, status.st_ino) == self._file and status.st_size >= self._position
            if not same or header != self._header:  # it was replaced, as it is for another column
                self._file = status.st_dev, status.st_ino
                self._header, self._position = header, len(header)
                names = cells_of(header) if header.endswith(b"\n") else []
                self._columns = {name: [] if name == _TEXT.get(self._path.name) else array("d") for name in names}
            file.seek(self._position)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._position += len(whole)
        for line in filter(None, whole.splitlines()):
            for column, cell in itertools.zip_longest(self._columns.values(), cells_of(line)[: len(self._columns)]):
                column.append(_number(cell) if isinstance(column, array) else sys.intern(cell or ""))
        return {name: _as_numpy(column) for name, column in self._columns.items()}


def evaluations_of(memory: Any) -> int:
    """How many evaluations a run has had, by its state's `memory`, which may come from a file."""
    latest = memory.get("evaluations") if isinstance(memory, Mapping) else None
    number = latest.get("number") if isinstance(latest, Mapping) else None
    return number if type(number) is int else 0


def newer_rows(run: Path, epochs: int, evaluations: int) -> tuple[list[Path], list[Cut]]:
    """What a run that stands after so many epochs and evaluations must move aside: files, and rows of files.

    The plot is moved along with any row, because it shows those rows. Damaged rows, which have no number in the column
    that counts them, are moved too. A file without that column is moved whole.
    """
    limits = {EPOCHS: ("epoch", epochs), EVALUATIONS: ("evaluation", evaluations)}
    cuts = [cut for name, (key, last) in limits.items() for cut in _cut(run / name, key, last)]
    plot = run / PLOT
    return [plot] if cuts and plot.is_file() else [], cuts


def _cut(path: Path, key: str, last: int) -> Iterator[Cut]:
    """Yield the file without the rows that are damaged or whose `key` is above `last`, and these; else nothing."""
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
        logger.warning("%s: has no column %r: all of it is moved aside", path, key)
        yield Cut(path, None, content)
        return
    numbers = [_count(cells_of(row), names.index(key)) for row in rows]
    if damaged := numbers.count(None):
        logger.warning("%s: %d damaged row(s) without a number in the column %r are moved aside", path, damaged, key)
    newer = [number is None or number > last for number in numbers]
    if any(newer):
        stays = [row for row, goes in zip(rows, newer, strict=True) if not goes]
        moves = [row for row, goes in zip(rows, newer, strict=True) if goes]
        yield Cut(path, b"".join([header, *stays]) if stays else None, b"".join([header, *moves]))


def cells_of(line: bytes) -> list[str]:
    """Return the cells of a line of a CSV file; none for a damaged line, with a NUL or a cell beyond csv's limit."""
    if b"\0" in line:
        return []
    try:
        return next(csv.reader([line.decode(errors="replace")]), [])
    except csv.Error:
        return []


def _count(cells: list[str], where: int) -> int | None:
    try:
        return int(cells[where])
    except (ValueError, IndexError):
        return None


def _number(cell: str | None) -> float:
    try:
        return float(cell or "nan")
    except ValueError:
        return math.nan


def _as_numpy(column: Any) -> np.ndarray:
    return np.array(column) if isinstance(column, array) else np.array([text.encode() for text in column])
