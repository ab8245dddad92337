"""Reading a run's trajectories back, as numpy arrays.

No file is read before its hash was checked, and nothing before it is asked for. The files of a run appear as one:
tables and fields are joined over files, and the parts of an epoch that was cut are put together again.

Shapes: R rows of all epochs, N environments, K epochs, E episodes.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np

from rein.errors import StoreError
from rein.ops.trees import leaves, map_tree
from rein.stores.files import open_sealed
from rein.stores.folder import TRAJECTORIES, list_files
from rein.stores.layout import decode_name
from rein.types import Episodes, Trajectory, Tree

Table = dict[str, Any]  # name -> column, all of one length; `metrics` and `clocks` are tables in a table

_MISREAD = (KeyError, OSError, ValueError, TypeError, RuntimeError, AttributeError, IndexError)  # what odd files cause


def open_run(path: str | Path) -> Run:
    """The trajectories of a run folder, or of one file. Raises StoreError if there are none."""
    return Run(Path(path))


class _Content(NamedTuple):
    """A file with its tables."""

    file: Path
    epochs: Table
    episodes: Table


class Run:
    """The files of a run that were finished when it was opened; `path` is its folder, or one file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._found = [path] if path.is_file() else list_files(path / TRAJECTORIES) or list_files(path)
        self._checked: dict[Path, tuple[int, ...]] = {}
        if not self._found:
            raise StoreError(f"{path}: no trajectories there; give the folder of a run, or a file of its trajectories/")

    def __repr__(self) -> str:
        epochs, episodes = len(self.epochs["number"]), len(self.episodes["id"])
        return f"Run({str(self.path)!r}: {len(self.files)} files, {epochs} epochs, {episodes} episodes)"

    @functools.cached_property
    def info(self) -> dict[str, Any]:
        """What `run.json` says about the run; empty without one."""
        file = self.path / "run.json"
        try:
            return dict(json.loads(file.read_bytes())) if file.is_file() else {}
        except (OSError, ValueError, TypeError) as error:
            raise StoreError(f"{file}: cannot be read as JSON: {error}") from error

    @property
    def files(self) -> list[Path]:
        """The files in order, without those of an epoch of which a part is missing (one part alone may be opened)."""
        return [content.file for content in self._contents]

    @functools.cached_property
    def epochs(self) -> Table:
        """One row for each epoch: number, first_row, length, first_step, status, metrics and clocks; (K,) each."""
        rows = self._rows
        first = np.flatnonzero(np.diff(rows["number"], prepend=0))  # of the parts of an epoch
        table = map_tree(lambda column: column[first], rows)
        table["length"] = np.add.reduceat(rows["length"], first)
        table["first_row"] = np.cumsum(table["length"]) - table["length"]
        return {name: table[name] for name in table if name not in ("part", "parts", "file", "index")}

    @functools.cached_property
    def episodes(self) -> Table:
        """One row for each episode, in the order in which they ended; the columns are those of the file, (E,) each."""
        return _join([content.episodes for content in self._contents])

    @functools.cached_property
    def fields(self) -> dict[str, tuple[np.dtype, tuple[int, ...]]]:
        """Type and shape (R, N, ...) of every field by its path, `observation/camera`, as the first rows have them."""
        rows, found = int(self.epochs["length"].sum()), {}

        def visit(path: str, node: Any) -> None:
            if isinstance(node, h5py.Dataset):
                found[path] = node.dtype, (rows, *node.shape[1:])

        for file in self._filled[:1]:
            with self._open(file) as entry:
                entry["trajectory"].visititems(visit)
        return found

    def field(self, name: str) -> Tree:
        """A field of all epochs, (R, N, ...); a dictionary of them where it is nested."""
        if not any(path == name or path.startswith(f"{name}/") for path in self.fields):
            raise ValueError(f"{self.path}: no field {name!r}; there are {', '.join(self.fields)}")
        parts = []
        for file in self._filled:
            with self._open(file) as entry:
                parts.append(_read(entry["trajectory"][name], lambda node: node[()]))
        return map_tree(lambda *arrays: np.concatenate(arrays), *parts)

    def trajectory(self, epoch: int) -> Trajectory:
        """One epoch as the store was given it, in numpy arrays."""
        rows = np.flatnonzero(self._rows["number"] == epoch)
        if not len(rows):
            numbers = self.epochs["number"]
            raise ValueError(f"{self.path}: no epoch {epoch}; it has {len(numbers)} from {numbers[0]} to {numbers[-1]}")
        parts = [self._read_part(map_tree(lambda column, row=row: column[row], self._rows)) for row in rows]
        ended = [part.episodes for part in parts if len(part.episodes.id)] or [parts[0].episodes]
        return parts[0]._replace(
            fields=map_tree(lambda *arrays: np.concatenate(arrays), *(part.fields for part in parts)),
            next_observation=parts[-1].next_observation,
            episodes=map_tree(lambda *arrays: np.concatenate(arrays), *ended),
        )

    @functools.cached_property
    def _contents(self) -> list[_Content]:
        contents = [self._read_tables(file) for file in self._found]
        parts = collections.Counter(content.epochs["number"][0] for content in contents)
        whole = [c for c in contents if c.epochs["parts"][0] in (1, parts[c.epochs["number"][0]])]
        if not whole and len(contents) != 1:
            raise StoreError(f"{self.path}: of its one epoch a part is missing; open the parts by themselves")
        return whole or contents

    @property
    def _filled(self) -> list[Path]:
        """The files that have rows; one of nothing but skipped epochs has no fields."""
        return [content.file for content in self._contents if content.epochs["length"].any()]

    @functools.cached_property
    def _rows(self) -> Table:
        """The tables of epochs of all files, with a row for each part, and in which row of which file it lies."""
        tables = []
        for number, content in enumerate(self._contents):
            index = np.arange(len(content.epochs["number"]))
            tables.append(content.epochs | {"file": np.full_like(index, number), "index": index})
        return _join(tables)

    def _read_tables(self, file: Path) -> _Content:
        with self._open(file) as entry:
            epochs = {name: entry["epochs"][name][()] for name in ("number", "first_row", "length", "first_step")}
            epochs |= {name: entry["epochs"][name][()] for name in ("part", "parts")}
            epochs["status"] = entry["epochs"]["status"][()].astype(str)
            for kind in ("metrics", "clocks"):
                epochs[kind] = {decode_name(name): column[()] for name, column in entry["epochs"][kind].items()}
            names = [name for name in entry["episodes"] if name != "final_observation"]
            content = _Content(file, epochs, {name: entry["episodes"][name][()] for name in names})
            if not len(epochs["number"]) or len({len(column) for _, column in leaves(epochs)}) != 1:
                raise ValueError("its table of epochs is empty or uneven")
            return content

    def _read_part(self, row: Table) -> Trajectory:
        content = self._contents[row["file"]]
        rows = slice(row["first_row"], row["first_row"] + row["length"])
        ended = np.flatnonzero(content.episodes["epoch"] == row["number"])
        chosen = slice(ended[0], ended[-1] + 1) if len(ended) else slice(0)
        columns = {name: content.episodes[_on_disk(name)][chosen] for name in Episodes._fields[:-1]}
        final = following = None
        with self._open(content.file) as entry:
            fields = _read(entry["trajectory"], lambda node: node[rows])
            if len(ended) and "final_observation" in entry["episodes"]:
                final = _read(entry["episodes"]["final_observation"], lambda node: node[chosen])
            if "next_observation" in entry["epochs"]:
                following = _read(entry["epochs"]["next_observation"], lambda node: node[row["index"]])
        return Trajectory(
            epoch=int(row["number"]),
            status=str(row["status"]),
            first_step=int(row["first_step"]),
            fields=fields,
            next_observation=following,
            episodes=Episodes(**columns, final_observation=final),
            metrics={name: float(value) for name, value in row["metrics"].items()},
            clocks={name: float(value) for name, value in row["clocks"].items()},
        )

    @contextlib.contextmanager
    def _open(self, file: Path) -> Iterator[Any]:
        """The group `entry` of a file, whose hash is checked the first time and whenever it has changed."""
        try:
            status = file.stat()
            stamp = (status.st_ino, status.st_size, status.st_mtime_ns)
            with open_sealed(file, verified=self._checked.get(file) == stamp) as opened:
                self._checked[file] = stamp
                yield opened["entry"]
        except _MISREAD as error:
            raise StoreError(f"{file}: is not laid out as a file of trajectories: {error}") from error


def _on_disk(name: str) -> str:
    return "return" if name == "episode_return" else name


def _read(node: Any, read: Callable[[h5py.Dataset], Any]) -> Any:
    """What `read` gives for a dataset, and a dictionary of that for a group."""
    return {name: _read(child, read) for name, child in node.items()} if isinstance(node, h5py.Group) else read(node)


def _join(tables: Sequence[Table], sizes: Sequence[int] | None = None) -> Table:
    """One table below the other; NaN where one of them has no such column."""
    sizes = sizes or [len(next(iter(table.values()))) for table in tables]
    joined: Table = {}
    for name in dict.fromkeys(name for table in tables for name in table):
        columns = [table.get(name) for table in tables]
        if any(isinstance(column, dict) for column in columns):
            joined[name] = _join([column or {} for column in columns], sizes)
        else:
            filled = [np.full(n, np.nan) if c is None else c for c, n in zip(columns, sizes, strict=True)]
            joined[name] = np.concatenate(filled)
    return joined
