"""Episodes as HDF5's virtual datasets: a file that leads to the rows of a run's files, and copies none of them.

HDF5 gives fill values, and no error, where a file that it is led to is not there: see `Rows.write`.

Shapes: N environments, L transitions of an episode.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np

from rein.ops.trees import leaves, map_tree
from rein.store.format.files import promised_hash, write_whole
from rein.store.format.image import Memory
from rein.store.format.scan import Stored
from rein.store.format.tables import Content
from rein.types import Episode

Arrange = Callable[[Episode], tuple[Mapping[str, Any], Mapping[str, Any]]]
_FILES = 8  # whose flags are remembered: episodes come in the order of time


class Span(NamedTuple):
    """Rows of a dataset of another file that follow each other; of one environment, where it has environments."""

    file: int
    name: str  # its path
    dataset: Stored
    rows: slice
    environment: int | None

    def select(self, paths: Sequence[str]) -> h5py.VirtualSource:
        """These rows as HDF5 is to find them."""
        name = f"/entry/{self.name}".replace("%", "%%")  # %b would be a number to HDF5
        source = h5py.VirtualSource(paths[self.file], name, self.dataset.shape, self.dataset.dtype)
        return source[self.rows] if self.environment is None else source[self.rows, self.environment]


class Rows:
    """Rows of an array that lie in other files, one span after the other: their `shape` and `dtype`, none of them read.

    Raises ValueError where they are not of one kind.
    """

    def __init__(self, spans: Sequence[Span], blank: int = 0) -> None:
        kinds = {(s.dataset.dtype, s.dataset.shape[1 if s.environment is None else 2 :]) for s in spans}
        if len(kinds) != 1:
            raise ValueError(f"{spans[0].name}: is not the same in all files of an episode; copy its values instead")
        ((self.dtype, shape),) = kinds
        self.shape = (sum(span.rows.stop - span.rows.start for span in spans) + blank, *shape)
        self._spans = tuple(spans)
        self._blank = blank

    def followed_by(self, other: Rows) -> Rows:
        """These rows, then those of the other."""
        return Rows(self._spans + other._spans)

    def padded(self) -> Rows:
        """These rows and one more that is nowhere: NaN, 0 or False."""
        return Rows(self._spans, self._blank + 1)

    def write(self, group: h5py.Group, name: str, paths: Sequence[str]) -> None:
        """A virtual dataset. What is missing reads as NaN, as the least number that there is, as 0 or as False.

        The least number is that of signed integers; not where a row was `padded`.
        """
        layout, first = h5py.VirtualLayout(self.shape, self.dtype), 0
        for span in self._spans:
            stop = first + span.rows.stop - span.rows.start
            layout[first:stop] = span.select(paths)
            first = stop
        blank: Any = np.nan if self.dtype.kind == "f" else 0
        if self.dtype.kind == "i" and not self._blank:
            blank = np.iinfo(self.dtype).min
        group.create_virtual_dataset(name, layout, fillvalue=self.dtype.type(blank))


def write_episodes(path: Path, contents: Sequence[Content], arrange: Arrange) -> dict[str, str]:
    """Write the file `path` with a group for each whole episode, `episode_0`, ..., in the order in which they ended.

    `arrange(episode)` says what is in it: attributes, and a tree of datasets, `Rows` or arrays; the fields and the
    final observation that it is given are `Rows`. Returns the files that the new one leads to, relative to its folder,
    and the hash that each had.

    Raises StoreError where it cannot be written, and ValueError where the rows of an episode are not of one kind.
    """
    folder = os.path.realpath(path.parent)
    files = [os.path.relpath(os.path.realpath(content.file.path), folder) for content in contents]
    escaped, memory = [name.replace("%", "%%") for name in files], Memory()
    memory.clear()
    with h5py.File(memory, "w") as file:
        for number, episode in enumerate(linked_episodes(contents)):
            attributes, datasets = arrange(episode)
            group = file.create_group(f"episode_{number}")
            group.attrs.update(attributes)
            _write(group, datasets, escaped)
    write_whole(path, memory.view())
    return {name: promised_hash(content.file.path) for name, content in zip(files, contents, strict=True)}


def linked_episodes(contents: Sequence[Content]) -> Iterator[Episode]:
    """Every whole episode, in the order in which they ended, with `Rows` for arrays."""
    where = _Where(contents)
    for number, content in enumerate(contents):
        final = content.file.node("episodes", "final_observation")
        for index in range(len(content.episodes["id"])):
            told = {name: column[index].item() for name, column in content.episodes.items()}
            spans = where.find(told["environment"], told["first_step"], told["last_step"])
            if not spans or sum(rows.stop - rows.start for _, rows in spans) != told["length"]:
                continue
            at, row = slice(index, index + 1), {"episode_return": told["return"], **told}
            yield Episode(
                **{name: row[name] for name in Episode._fields[:-2]},
                fields=_fields(contents, spans, told["environment"]),
                final_observation=_named(
                    final,
                    "episodes/final_observation",
                    lambda name, s, at=at, n=number: Rows([Span(n, name, s, at, None)]),
                ),
            )


class _Where:
    """In which rows of which files the vector steps of a run are."""

    def __init__(self, contents: Sequence[Content]) -> None:
        self._contents = contents
        number_K = [np.full(len(content.epochs["number"]), file) for file, content in enumerate(contents)]
        columns = {name: [c.epochs[name] for c in contents] for name in ("first_step", "length", "first_row")}
        table = {n: np.concatenate([np.zeros(0, int), *c]) for n, c in {**columns, "file": number_K}.items()}
        order = np.argsort(table["first_step"], kind="stable")
        self._first, self._length, self._row, self._file = (
            table[name][order] for name in ("first_step", "length", "first_row", "file")
        )
        self._valid = functools.lru_cache(_FILES)(self._read_valid)

    def find(self, environment: int, first: int, last: int) -> list[tuple[int, slice]]:
        """File and rows of the valid ones among the steps [first, last] of an environment, those together that are."""
        spans: list[tuple[int, slice]] = []
        begin = max(0, int(np.searchsorted(self._first, first, "right")) - 1)
        for k in range(begin, int(np.searchsorted(self._first, last, "right"))):
            step, file = int(self._first[k]), int(self._file[k])
            start, stop = max(first - step, 0), min(last + 1 - step, int(self._length[k]))
            if stop <= start or not 0 <= environment < self._contents[file].num_envs:
                continue
            for rows in self._valid_spans(file, environment, start + int(self._row[k]), stop + int(self._row[k])):
                if spans and spans[-1][0] == file and spans[-1][1].stop == rows.start:
                    rows = slice(spans.pop()[1].start, rows.stop)
                spans.append((file, rows))
        return spans

    def _valid_spans(self, file: int, environment: int, start: int, stop: int) -> Iterator[slice]:
        flags = self._valid(file)
        if flags is None:
            yield slice(start, stop)
            return
        edges = np.flatnonzero(np.diff(flags[start:stop, environment], prepend=False, append=False))
        yield from (slice(start + int(a), start + int(b)) for a, b in edges.reshape(-1, 2))

    def _read_valid(self, file: int) -> np.ndarray | None:
        content = self._contents[file]
        stored = content.fields.get("valid")
        flags = None if stored is None else content.file.read(stored)
        return None if flags is None or flags.all() else flags


def _fields(contents: Sequence[Content], spans: Sequence[tuple[int, slice]], environment: int) -> dict[str, Any]:
    """Every field of an episode, as `Rows`. Raises ValueError where they are others in another file."""
    parts = [
        _named(
            contents[file].file.layout["trajectory"],
            "trajectory",
            lambda name, stored, at=rows, n=file: Rows([Span(n, name, stored, at, environment)]),
        )
        for file, rows in spans
    ]
    for part in parts[1:]:
        if gone := dict(leaves(part)).keys() ^ dict(leaves(parts[0])).keys():
            raise ValueError(f"the fields of an episode change from one epoch to the next: {min(gone)!r}")
    return functools.reduce(lambda a, b: map_tree(Rows.followed_by, a, b), parts)


def _named(node: Any, path: str, function: Callable[[str, Stored], Any]) -> Any:
    """What `function` gives for each dataset and its path; None where there is none."""
    if isinstance(node, dict):
        return {name: _named(child, f"{path}/{name}", function) for name, child in node.items()}
    return None if node is None else function(path, node)


def _write(group: h5py.Group, tree: Mapping[str, Any], paths: Sequence[str]) -> None:
    for name, node in tree.items():
        if isinstance(node, Mapping):
            _write(group.create_group(name), node, paths)
        elif isinstance(node, Rows):
            node.write(group, name, paths)
        else:
            group.create_dataset(name, data=node)
