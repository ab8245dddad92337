"""Write rows to a CSV file, for pandas, NumPy and spreadsheets."""

from __future__ import annotations

import contextlib
import csv
import errno
import io
import logging
import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from rein.files import absolute, make_folder, open_file
from rein.handlers.output import Names
from rein.store.format.sealed import write_whole

Cell = float | int | str | None

report = logging.getLogger("rein")


class CSVLogger:
    """Append a line to `path` for each row. The first row creates the file and its folder.

    - A row is written as one whole line. A killed process leaves at most one incomplete line, which is removed when the
      file is opened again.
    - A new column is added to the header in a new file, which replaces the old one atomically.
    - If an editor or rsync replaced the file, it is opened again before the next row. A file with several hard links is
      copied first, so that other copies of a run do not change.
    - Missing values are empty cells. NaN and infinity are `nan`, `inf` and `-inf`.
    - Rows are safe on disk after `flush` or `close`.
    - A resumed run continues after the rows of its checkpoint, see `go_on`. A new run appends to an existing file.

    Raises OSError or StoreError if the file cannot be written, or if it is a symbolic link or a pipe.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = absolute(path)
        self._file: io.FileIO | None = None
        self._stamp: tuple[int, ...] | None = None  # of the file after the last write
        self._columns: dict[str, None] = {}
        self._names = Names(_on_one_line)

    def write(self, clocks: Mapping[str, float], metrics: Mapping[str, float]) -> None:
        """Append a row of all clocks and metrics. A metric with the name of a clock is called `<name>_metric`."""
        self.append(merge(clocks, metrics))

    def go_on(self, clocks: Mapping[str, float]) -> None:
        """Remove the rows at the end of the file that are newer than `clocks`; a resumed run writes them again.

        A row is newer if it has more `iterations`, or equal `iterations` and more `epochs`. Rows are removed from the
        end of the file, up to a row that is not newer or that belongs to an earlier run. A row belongs to an earlier
        run if its clocks are ahead of those of the next row. A file without the column `iterations` is not changed. The
        file is truncated by one call, so a killed process leaves all of these rows or none.
        """
        try:
            if not os.path.lexists(self.path):
                return
            file = self._current()
            position, count = _newer_rows(file, list(self._columns), clocks)
            if count:
                file.truncate(position)
                self._stamp = _stamp(os.fstat(file.fileno()))
                message = "%s: removed %d row(s) newer than iteration %s, from which the run continues"
                report.warning(message, self.path, count, f"{clocks['iterations']:,}")
        except BaseException:  # close the file after any error
            self._release()
            raise

    def append(self, row: Mapping[str, Cell]) -> None:
        """Append one line. After an error, the next call opens and repairs the file."""
        try:
            file = self._current()
            if not row.keys() <= self._columns.keys():
                row = {self._names[name]: cell for name, cell in row.items()}
                if new := [name for name in row if name not in self._columns]:
                    file = self._add_columns(file, new)
            _write(file, _line(map(row.get, self._columns)))
            self._stamp = _stamp(os.fstat(file.fileno()))
        except BaseException:  # close the file after any error
            self._release()
            raise

    def flush(self) -> None:
        """Write all rows to disk."""
        if self._file is not None:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Flush and close the file. The next row opens it again."""
        try:
            self.flush()
        finally:
            self._release()

    def _current(self) -> io.FileIO:
        """Return the open file. It is opened again unless the file at the path is unchanged since the last write."""
        if self._file is None:
            return self._open()
        with contextlib.suppress(FileNotFoundError):
            if _stamp(os.lstat(self.path)) == self._stamp:
                return self._file
        self._release()
        return self._open(replaced=True)

    def _open(self, replaced: bool = False) -> io.FileIO:
        """Open the file and read its columns. Unless `replaced`, the last line may be incomplete."""
        make_folder(self.path.parent)
        self._file = file = open_file(self.path, "a+b", buffering=0)
        if os.fstat(file.fileno()).st_nlink > 1:  # for example a copy made by `cp -al`
            file.seek(0)
            content = file.readall()
            self._release()
            write_whole(self.path, content)
            return self._open(replaced)
        if replaced:
            _end_last_line(file)
        else:
            _remove_incomplete_line(file)
        with open_file(self.path) as start:
            header = start.readline().decode()
        self._columns = dict.fromkeys(next(csv.reader([header]))) if header else {}
        self._stamp = _stamp(os.fstat(file.fileno()))
        return file

    def _add_columns(self, file: io.FileIO, new: list[str]) -> io.FileIO:
        """Rewrite the file with more columns, which are empty in existing rows."""
        file.seek(0)
        rows = file.readall().splitlines()[1:]
        columns = [*self._columns, *new]
        blank = b"," * len(new) + b"\n"
        content = _line(columns) + b"".join(row + blank for row in rows)
        self._release()  # Windows does not replace a file that is open
        write_whole(self.path, content)
        return self._open()

    def _release(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def merge(clocks: Mapping[str, Cell], metrics: Mapping[str, float]) -> dict[str, Cell]:
    """Return clocks and metrics as one row."""
    return {**clocks, **{f"{name}_metric" if name in clocks else name: value for name, value in metrics.items()}}


def _line(cells: Iterable[Cell]) -> bytes:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([_on_one_line(cell) if isinstance(cell, str) else cell for cell in cells])
    return text.getvalue().encode()


def _on_one_line(text: str) -> str:
    return " ".join(text.splitlines())


def _newer_rows(file: io.FileIO, columns: list[str], clocks: Mapping[str, float]) -> tuple[int, int]:
    """Return the position and number of the last rows that are newer than `clocks` and belong to one run."""
    names = [name for name in ("iterations", "epochs") if name in columns]
    cells, now, behind = [columns.index(name) for name in names], [clocks[name] for name in names], [math.inf]
    file.seek(0)
    content, count = file.readall(), 0
    start, header = len(content), content.find(b"\n") + 1
    while start > header and "iterations" in names:
        before = content.rfind(b"\n", 0, start - 1) + 1
        try:
            row = next(csv.reader([content[before:start].decode()]))
            numbers = [float(row[cell]) for cell in cells]
        except (ValueError, IndexError, csv.Error):  # not a row of a run
            break
        if not now < numbers <= behind:  # clocks decrease only between runs
            break
        start, behind, count = before, numbers, count + 1
    return start, count


def _remove_incomplete_line(file: io.FileIO) -> None:
    file.seek(0)
    content = file.readall()
    if (end := content.rfind(b"\n") + 1) < len(content):
        file.truncate(end)


def _end_last_line(file: io.FileIO) -> None:
    if file.seek(0, os.SEEK_END):
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":
            _write(file, b"\n")


def _stamp(status: os.stat_result) -> tuple[int, ...]:
    """Return device, inode, number of links and size of a file."""
    return status.st_dev, status.st_ino, status.st_nlink, status.st_size


def _write(file: io.FileIO, line: bytes) -> None:
    rest = memoryview(line)
    while rest:
        written = file.write(rest)
        if not written:
            raise OSError(errno.EIO, "the system accepts no more bytes", str(file.name))
        rest = rest[written:]
