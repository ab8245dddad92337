"""Fields of a run that are held in memory, in an order in which a window of rows is one piece.

Memory answers slowly and gives much at once: windows are gathered as pieces, not row by row, and narrow fields, the
flags and rewards, lie side by side. That is faster than gathers by `numpy.take` from an array for each field.

Shapes: B windows of a batch, L rows of a window, N environments, R rows of a file, G = the sum of R x N.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import numpy as np

from rein.store.format.tables import Content

_NARROW = 8  # bytes of a row


class Held:
    """Windows of the fields called `paths`."""

    def __init__(self, contents: Sequence[Content], paths: Sequence[str], length: int) -> None:
        self.order = Order(contents)
        narrow: dict[str, np.ndarray] = {}
        self._wide: dict[str, np.ndarray] = {}
        for path in paths:
            stored = contents[0].fields[path]
            parts = (content.file.field(path) for content in contents)
            column = self.order.arrange(parts, stored.shape[2:], stored.dtype.newbyteorder("="))
            # the next observations are windows one row later, and all that is narrow would come with them
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
        """The windows (B, L, ...) of all fields that begin at these places."""
        found: dict[str, np.ndarray] = {}
        if self._kind.itemsize:
            narrow_BL = _taken(self._narrow, begin_B).view(self._kind)[..., 0]
            found = {path: narrow_BL[path].copy() for path in self._kind.fields or ()}
        return found | {path: _taken(windows, begin_B) for path, windows in self._wide.items()}

    def take_wide(self, path: str, begin_B: np.ndarray) -> np.ndarray:
        """Those of one field, an observation or what is not narrow."""
        return _taken(self._wide[path], begin_B)


class Elsewhere:
    """Which rows of windows are special: their next observation is `source`, not that of the row after them."""

    def __init__(self, order: Order, special_G: np.ndarray, source: np.ndarray, length: int) -> None:
        place = order.place(np.flatnonzero(special_G))
        sort = np.argsort(place)
        self._places, self._source = place[sort], source[sort]
        self._special = np.zeros(order.size, bool)
        self._special[place] = True
        before = np.cumsum(np.concatenate([[0], self._special]))
        # by where a window begins, if there is room for any
        self._touched = before[length:] > before[: max(0, len(before) - length)]
        self._steps = np.arange(length)

    def find(self, begin_B: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Window, row in it and source of each special row of the windows that begin at these places."""
        # by methods: numpy's functions of the same names take longer than the work, once for every batch
        (touched,) = self._touched[begin_B].nonzero()  # few of them: most windows lie inside an episode
        places = begin_B[touched][:, None] + self._steps
        window, row = self._special[places].nonzero()
        return touched[window], row, self._source[self._places.searchsorted(places[window, row])]


class Order:
    """The rows of an environment one after the other.

    Files that follow each other and have one number of environments are a stretch: (N, the sum of R) rows.
    """

    def __init__(self, contents: Sequence[Content]) -> None:
        stretches = [list(group) for _, group in itertools.groupby(contents, lambda content: content.num_envs)]
        self._lengths = [[content.rows for content in stretch] for stretch in stretches]
        self._envs = np.array([stretch[0].num_envs for stretch in stretches], np.int64)
        self._rows = np.array([sum(lengths) for lengths in self._lengths], np.int64)
        self._base = np.cumsum([0, *(self._envs * self._rows)])
        self.size = int(self._base[-1]) + 1  # of what is arranged

    def place(self, row_B: np.ndarray) -> np.ndarray:
        """Where these rows, by their number g (see `rein.store.rows`), are."""
        if not len(row_B):
            return row_B
        stretch_B = np.searchsorted(self._base, row_B, "right") - 1
        base_B = self._base[stretch_B]
        row_in_B, environment_B = np.divmod(row_B - base_B, self._envs[stretch_B])
        return base_B + environment_B * self._rows[stretch_B] + row_in_B

    def arrange(self, parts: Iterable[np.ndarray], shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """(G + 1, *shape): what each file has of its rows (R * N, *shape), and one more row that is nowhere."""
        arranged, given = np.empty((self.size, *shape), dtype), iter(parts)  # numpy asks for huge pages, not for zeros
        arranged[-1] = 0
        for lengths, num_envs, rows, base in zip(self._lengths, self._envs, self._rows, self._base, strict=False):
            stretch_NR = arranged[base : base + num_envs * rows].reshape(num_envs, rows, *shape)
            first = 0
            for length in lengths:
                part_RN = next(given).reshape(length, num_envs, *shape)
                stretch_NR[:, first : first + length] = part_RN.swapaxes(0, 1)
                first += length
        return arranged


def _windows(column: np.ndarray, length: int) -> np.ndarray:
    """All windows of so many rows, (W, L, ...); they share the memory of the column."""
    count = max(0, len(column) + 1 - length)
    return np.ndarray((count, length, *column.shape[1:]), column.dtype, column, 0, (column.strides[0], *column.strides))


def _taken(windows: np.ndarray, begin_B: np.ndarray) -> np.ndarray:
    """(B, L, ...): each window is copied as one piece; single rows are quicker by `take`."""
    return np.take(windows, begin_B, axis=0, mode="clip") if windows.shape[1] == 1 else windows[begin_B]
