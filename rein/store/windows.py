"""Gather windows of rows of a run by index, from all files, together with the observation after every row.

Small fields are held in memory. Memory latency dominates random access. Therefore a window is copied as one block
instead of row by row, and narrow fields, such as flags and rewards, are interleaved. This is faster than `numpy.take`
per field.

Shapes: B windows of a batch, L rows of a window, N environments, R rows of a file, G = the sum of R x N.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from rein.store.format.trajectory_reader import Content
from rein.store.rows import TransitionRows, find_rows, rows_of_episodes
from rein.types import Transition

_SMALL = 32 << 20  # bytes of a field of a run; up to this size, one gather from memory is faster than one per file
_LAZY = (
    "_rows",
    "_maps",
    "_held",
    "_elsewhere",
    "_others",
    "_first",
    "_count",
    "_found",
    "_begin",
    "_envs",
    "_one_step",
)  # computed by each worker
_NARROW = 8  # bytes of a row


class Windows:
    """Base class of `Transitions` and `Sequences`: windows of rows, gathered from all files by index."""

    _first: Any  # (len,) first row of each element
    _count: Any = None  # (len,) transitions of each element, if some are padded

    def __init__(
        self,
        contents: Sequence[Content],
        length: int,
        fields: Collection[str] | None,
        episodes: tuple[np.ndarray, ...] | None,
    ) -> None:
        if isinstance(fields, str):
            raise ValueError(f"fields={fields!r}: must be a list of names, or None for all fields")
        self._contents = list(contents)
        self._length = length
        self._spare = 1  # zero rows after the last one in memory, which windows may contain
        self._flat = False  # whether to drop the dimension L, which is 1
        self._episodes = episodes  # environment, first and last vector step of the selected episodes
        self._paths = _chosen(contents, fields)
        self._observations = [path for path in self._paths if path.split("/")[0] == "observation"]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in _LAZY}

    @functools.cached_property
    def _rows(self) -> TransitionRows:
        rows = find_rows(self._contents, observed=bool(self._observations))
        if self._episodes is not None:
            environment_E, first_E, last_E = self._episodes
            wanted_G = rows_of_episodes(self._contents, environment_E, np.stack([first_E, last_E], axis=1))
            rows = rows._replace(whole_G=rows.whole_G & wanted_G, follows_G=rows.follows_G & wanted_G)
        return rows

    @functools.cached_property
    def _maps(self) -> dict[str, list[np.ndarray]]:
        """Large raw fields: a memory map (R * N, ...) per file."""
        found = {}
        for path in self._paths:
            stored = [content.fields[path] for content in self._contents]
            size = sum(math.prod(s.shape) * s.dtype.itemsize for s in stored)
            if size > _SMALL and all(s.is_raw for s in stored):
                found[path] = [content.file.field(path) for content in self._contents]
        return found

    @functools.cached_property
    def _held(self) -> Held:
        """All other fields, in memory."""
        paths = [path for path in self._paths if path not in self._maps]
        return Held(self._contents, paths, self._length, self._spare)

    @functools.cached_property
    def _elsewhere(self) -> Elsewhere:
        """Rows whose next observation is in `_others`."""
        return Elsewhere(self._held.order, self._rows.special_G, self._rows.source, self._length)

    @functools.cached_property
    def _begin(self) -> np.ndarray:
        """Positions in memory at which the elements begin."""
        return self._held.order.place(self._first)

    @functools.cached_property
    def _others(self) -> dict[str, np.ndarray]:
        """All final observations, then all next observations, in the order of `TransitionRows.source`."""
        found = {}
        for path in self._observations:
            inner, parts = path.split("/")[1:], []
            for table, name in (("episodes", "final_observation"), ("epochs", "next_observation")):
                for content in self._contents:
                    stored = content.file.node(table, name, *inner)
                    if stored is not None:
                        lead = 1 if table == "episodes" else 2  # (E, ...), or (K, N, ...)
                        count = math.prod(stored.shape[:lead])  # -1 fails for arrays without elements
                        parts.append(content.file.read(stored).reshape(count, *stored.shape[lead:]))
                        continue
                    dtype, shape = content.fields[path].dtype, content.fields[path].shape  # unused placeholders
                    columns = content.episodes["id"] if table == "episodes" else content.epochs["number"]
                    count = len(columns) * (1 if table == "episodes" else shape[1])
                    parts.append(np.zeros((count, *shape[2:]), dtype))
            found[path] = np.concatenate(parts)
        return found

    @functools.cached_property
    def _envs(self) -> np.ndarray:
        return np.array([content.num_envs for content in self._contents])

    @functools.cached_property
    def _one_step(self) -> int | None:
        """Distance to the next row of an environment, or None if it differs between files."""
        return int(self._envs[0]) if len(set(self._envs.tolist())) == 1 else None

    def gather(self, index: slice | np.ndarray) -> Transition:
        """Gather the windows (B, L, ...) of these elements."""
        begin_B = self._begin[index]
        found = self._held.take(begin_B)
        following = {path: self._held.take_wide(path, begin_B + 1) for path in self._observations if path in found}
        if self._maps:
            here, later = (self._places(index, n) for n in (0, 1))
            found |= {path: here.take(column) for path, column in self._maps.items()}
            following |= {p: later.take(column) for p, column in self._maps.items() if p in self._observations}
        if following:
            window, row, source = self._elsewhere.find(begin_B)
            for path, array in following.items():
                array[window, row] = self._others[path][source]
        valid_BL = np.ones((len(begin_B), self._length), bool)
        if self._count is not None:
            valid_BL = np.arange(self._length) < self._count[index][:, None]
            for array in (*found.values(), *following.values()):
                array[~valid_BL] = 0
        return self._transition(found, following, valid_BL)

    def _step(self, first_B: np.ndarray) -> Any:
        """Return the distance from each of these rows to the next row of its environment: N of its file."""
        if self._one_step is not None:
            return self._one_step
        return self._envs[np.searchsorted(self._rows.base, first_B, "right") - 1]

    def _places(self, index: slice | np.ndarray, later: int) -> _Places:
        """Locate the rows of these windows, shifted by `later` steps."""
        first_B1 = self._first[index][:, None]
        rows_BL = first_B1 + self._step(first_B1) * np.arange(later, later + self._length)
        return _Places(self._contents, self._rows.base, rows_BL)

    def _transition(self, found: dict[str, Any], following: dict[str, Any], valid: np.ndarray) -> Transition:
        if self._flat:
            valid = valid[:, 0]
            lead = valid.shape
            found, following = ({p: a.reshape(lead + a.shape[2:]) for p, a in x.items()} for x in (found, following))
        tree = _nest(found)
        known = {name: tree.pop(name, None) for name in ("observation", "action", "reward", "terminated", "truncated")}
        next_observation = _nest(following).get("observation")
        return Transition(**known, next_observation=next_observation, valid=torch.from_numpy(valid), extras=tree)


class _Places:
    """Rows (B, L) of a run by their numbers, and the files that contain them."""

    def __init__(self, contents: Sequence[Content], base: np.ndarray, rows_BL: np.ndarray) -> None:
        self._contents = contents
        self._base = base
        self._rows_BL = rows_BL

    def take(self, column: list[np.ndarray]) -> np.ndarray:
        """Return the values (B, L, ...) of a field. Values of rows beyond the end are undefined."""
        taken = np.empty((*self._rows_BL.shape, *column[0].shape[1:]), column[0].dtype)
        for file, rows, where in self._blocks:
            taken[where] = np.take(column[file], rows, axis=0, mode="clip")
        return taken

    @functools.cached_property
    def _blocks(self) -> list[Any]:
        """List of (file, its rows, target index): whole windows, or single rows of windows that span several files."""
        rows_BL, base = self._rows_BL, self._base
        first_B, last_B = (self._file_of(rows_BL[:, at]) for at in (0, -1))
        blocks = []
        for file in np.union1d(first_B, last_B):  # reading a map of a truncated file would kill the process
            self._contents[file].file.check()
        for file, window in _groups(first_B, np.flatnonzero(first_B == last_B)):
            blocks.append((file, rows_BL[window] - base[file], window))
        crossing = np.flatnonzero(first_B != last_B)
        rows, place = rows_BL[crossing].reshape(-1), np.arange(rows_BL.shape[1])
        window, step = np.repeat(crossing, len(place)), np.tile(place, len(crossing))
        for file, at in _groups(self._file_of(rows), np.arange(len(rows))):
            blocks.append((file, rows[at] - base[file], (window[at], step[at])))
        return blocks

    def _file_of(self, rows: np.ndarray) -> np.ndarray:
        return np.minimum(np.searchsorted(self._base, rows, "right") - 1, len(self._base) - 2)


def _groups(file_B: np.ndarray, of: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Yield each file with those elements `of` the batch that it contains."""
    if len(of):
        order = of[np.argsort(file_B[of], kind="stable")]
        for part in np.split(order, np.flatnonzero(np.diff(file_B[order])) + 1):
            yield int(file_B[part[0]]), part


def _chosen(contents: Sequence[Content], fields: Collection[str] | None) -> list[str]:
    """Return the paths of these fields. Raises ValueError if a file lacks a field or has it in another shape."""
    kinds = [{p: (s.dtype, s.shape[2:]) for p, s in content.fields.items()} for content in contents]
    every = kinds[0] if kinds else {}
    names = dict.fromkeys(path.split("/")[0] for path in every)
    if missing := [name for name in fields or () if kinds and name not in names]:
        raise ValueError(f"fields={list(fields or ())}: no field {missing}; the fields are {list(names)}")
    wanted = set(names if fields is None else fields) - {"valid"}  # gathered rows are always valid
    paths = [path for path in every if path.split("/")[0] in wanted]
    for content, kind in zip(contents, kinds, strict=True):
        differ = [path for path in paths if kind.get(path) != every[path]]
        if fields is None:
            differ += [path for path in kind if path not in every]
        if differ:
            raise ValueError(f"{content.file.path}: the field {differ[0]} differs from {contents[0].file.path}")
    return paths


def _nest(found: dict[str, np.ndarray]) -> dict[str, Any]:
    """Convert arrays by path to a tree of tensors."""
    tree: dict[str, Any] = {}
    for path, array in found.items():
        if "/" not in path:
            tree[path] = torch.from_numpy(array)
            continue
        *inner, name = path.split("/")
        functools.reduce(lambda node, key: node.setdefault(key, {}), inner, tree)[name] = torch.from_numpy(array)
    return tree


class Held:
    """Fields in memory, from which windows are gathered."""

    def __init__(self, contents: Sequence[Content], paths: Sequence[str], length: int, spare: int) -> None:
        self.order = Order(contents, spare)
        narrow: dict[str, np.ndarray] = {}
        self._wide: dict[str, np.ndarray] = {}
        for path in paths:
            stored = contents[0].fields[path]
            parts = (content.file.field(path) for content in contents)
            column = self.order.arrange(parts, stored.shape[2:], stored.dtype.newbyteorder("="))
            # observations stay separate: the next observations are gathered without the other narrow fields
            if 0 < column.nbytes <= _NARROW * len(column) and path.split("/")[0] != "observation":
                narrow[path] = column
            else:
                self._wide[path] = _windows(column, length)
        self._kind = np.dtype([(path, column.dtype, column.shape[1:]) for path, column in narrow.items()])
        joined = np.empty(self.order.size, self._kind)
        for path, column in narrow.items():
            joined[path] = column
        self._narrow = _windows(joined.view(np.uint8).reshape(len(joined), self._kind.itemsize), length)

    def take(self, begin_B: np.ndarray) -> dict[str, np.ndarray]:
        """Return the windows (B, L, ...) of all fields that begin at these positions."""
        found: dict[str, np.ndarray] = {}
        if self._kind.itemsize:
            narrow_BL = _taken(self._narrow, begin_B).view(self._kind)[..., 0]
            found = {path: narrow_BL[path].copy() for path in self._kind.fields or ()}
        return found | {path: _taken(windows, begin_B) for path, windows in self._wide.items()}

    def take_wide(self, path: str, begin_B: np.ndarray) -> np.ndarray:
        """Return the windows of one field, which is an observation or not narrow."""
        return _taken(self._wide[path], begin_B)


class Elsewhere:
    """Special rows of windows: their next observation is `source` instead of the observation in the next row."""

    def __init__(self, order: Order, special_G: np.ndarray, source: np.ndarray, length: int) -> None:
        place = order.place(np.flatnonzero(special_G))
        sort = np.argsort(place)
        self._places, self._source = place[sort], source[sort]
        self._special = np.zeros(order.size, bool)
        self._special[place] = True
        before = np.cumsum(np.concatenate([[0], self._special]))
        # whether a window that begins at each position contains a special row
        self._touched = before[length:] > before[: max(0, len(before) - length)]
        self._steps = np.arange(length)

    def find(self, begin_B: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return window, row and source of each special row in the windows that begin at these positions."""
        # array methods: the overhead of NumPy's functions would exceed the work per batch
        (touched,) = self._touched[begin_B].nonzero()  # few, because most windows lie inside an episode
        places = begin_B[touched][:, None] + self._steps
        window, row = self._special[places].nonzero()
        return touched[window], row, self._source[self._places.searchsorted(places[window, row])]


class Order:
    """Order of the rows in memory: the rows of each environment are contiguous.

    Consecutive files with the same N form a stretch of (N, sum of R) rows. `spare` zero rows follow the last one.
    """

    def __init__(self, contents: Sequence[Content], spare: int) -> None:
        stretches = [list(group) for _, group in itertools.groupby(contents, lambda content: content.num_envs)]
        self._lengths = [[content.rows for content in stretch] for stretch in stretches]
        self._envs = np.array([stretch[0].num_envs for stretch in stretches], np.int64)
        self._rows = np.array([sum(lengths) for lengths in self._lengths], np.int64)
        self._base = np.cumsum([0, *(self._envs * self._rows)])
        self.size = int(self._base[-1]) + spare  # rows of an arranged array

    def place(self, row_B: np.ndarray) -> np.ndarray:
        """Return the positions of rows, given by their numbers g (see `rein.store.rows`)."""
        if not len(row_B):
            return row_B
        stretch_B = np.searchsorted(self._base, row_B, "right") - 1
        base_B = self._base[stretch_B]
        row_in_B, environment_B = np.divmod(row_B - base_B, self._envs[stretch_B])
        return base_B + environment_B * self._rows[stretch_B] + row_in_B

    def arrange(self, parts: Iterable[np.ndarray], shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Arrange the rows (R * N, ...) of each file as (G + spare, ...)."""
        arranged, given = np.empty((self.size, *shape), dtype), iter(parts)  # gets huge pages, unlike np.zeros
        arranged[int(self._base[-1]) :] = 0
        for lengths, num_envs, rows, base in zip(self._lengths, self._envs, self._rows, self._base, strict=False):
            stretch_NR = arranged[base : base + num_envs * rows].reshape(num_envs, rows, *shape)
            first = 0
            for length in lengths:
                part_RN = next(given).reshape(length, num_envs, *shape)
                stretch_NR[:, first : first + length] = part_RN.swapaxes(0, 1)
                first += length
        return arranged


def _windows(column: np.ndarray, length: int) -> np.ndarray:
    """Return all windows of `length` rows, (W, L, ...), as a view of the column."""
    count = max(0, len(column) + 1 - length)
    return np.ndarray((count, length, *column.shape[1:]), column.dtype, column, 0, (column.strides[0], *column.strides))


def _taken(windows: np.ndarray, begin_B: np.ndarray) -> np.ndarray:
    """Copy windows (B, L, ...), each as one block. For single rows `take` is faster."""
    return np.take(windows, begin_B, axis=0, mode="clip") if windows.shape[1] == 1 else windows[begin_B]
