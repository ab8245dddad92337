"""The CSV files in a run's folder, read back: their columns, and which of their rows are newer than a checkpoint."""

from __future__ import annotations

import csv
import itertools
import logging
import math
import sys
from array import array
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rein.errors import StoreError
from rein.safe import TEXT, is_regular, open_file, read_file
from rein.stores.folder import Cut

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
        self._header = b""
        self._position = 0
        self._columns: dict[str, Any] = {}  # name -> array of numbers, or list of texts

    def refresh(self) -> dict[str, np.ndarray]:
        """Every column: float64, or bytes where it holds text."""
        if not is_regular(self._path):
            return {}
        with open_file(self._path, limit=TEXT) as file:
            header = file.readline()
            if header != self._header:  # it has got more columns, and so is another file
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

    The plot is among the files where a row is: it shows what is no longer so. A file whose rows do not say where they
    belong, for somebody may have edited it, is moved whole.
    """
    limits = {EPOCHS: ("epoch", epochs), EVALUATIONS: ("evaluation", evaluations)}
    cuts = [cut for name, (key, last) in limits.items() for cut in _cut(run / name, key, last)]
    plot = run / PLOT
    return [plot] if cuts and plot.is_file() else [], cuts


def _cut(path: Path, key: str, last: int) -> Iterator[Cut]:
    """The file without the rows whose `key` is above `last`, and those; nothing where there are none."""
    try:
        content = read_file(path) if is_regular(path) else b""
    except OSError as error:
        raise StoreError(f"{path}: cannot be read: {error.strerror}") from error
    lines = [line for line in content.splitlines(keepends=True) if line.strip() and line.endswith(b"\n")]
    header, *rows = lines or [b""]
    if not rows:
        return
    try:
        where = cells_of(header).index(key)
        newer = [int(cells_of(row)[where]) > last for row in rows]
    except (ValueError, IndexError):
        logger.warning("%s: not every row has a number in a column %r: all of it is moved aside", path, key)
        yield Cut(path, None, content)
        return
    if any(newer):
        stays = [row for row, goes in zip(rows, newer, strict=True) if not goes]
        moves = [row for row, goes in zip(rows, newer, strict=True) if goes]
        yield Cut(path, b"".join([header, *stays]) if stays else None, b"".join([header, *moves]))


def cells_of(line: bytes) -> list[str]:
    """The cells of a line of a CSV file."""
    return next(csv.reader([line.decode(errors="replace")]), [])


def _number(cell: str | None) -> float:
    try:
        return float(cell or "nan")
    except ValueError:
        return math.nan


def _as_numpy(column: Any) -> np.ndarray:
    return np.array(column) if isinstance(column, array) else np.array([text.encode() for text in column])
