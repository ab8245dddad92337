"""Rows in blocks that say whether they have changed, so that whoever keeps states copies only what is new.

Shapes: R rows, K of them in a block.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, MutableMapping, Sequence

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

BLOCK = 4 << 20  # bytes: what a checkpoint writes anew for one new row, and the least that it takes to find it


class Mark:
    """What is said of a part of a state: while two tensors have the same mark, the same bytes stand in them."""

    __slots__ = ("__weakref__",)


def mark_of(tensor: Tensor) -> Mark | None:
    """The mark of a block, None of any other tensor."""
    return _marks.get(tensor)


_marks: MutableMapping[Tensor, Mark] = WeakTensorKeyDictionary()  # no attribute: those are pickled, and copied with it


class Blocks:
    """Rows (R, ...) in blocks of at most `BLOCK` bytes, each with a mark until something is written to it.

    Whoever writes to the rows says which in `writing`. What anybody else writes through torch is noticed, and then no
    block is what it was.
    """

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows
        self._length = max(1, BLOCK // max(1, math.prod(rows.shape[1:]) * rows.element_size()))  # rows of a block
        self._renew()

    @contextlib.contextmanager
    def writing(self, first: int = 0, last: int | None = None) -> Iterator[None]:
        """Around what writes to rows `first` to `last`, the latter exclusive: past the end it goes on at row 0."""
        if self.rows._version != self._version:
            self._renew()
        yield
        rows = len(self.rows)
        stop = rows if last is None else last
        for begin, end in ((first, min(stop, rows)), (0, stop - rows)):
            for block in range(begin // self._length, -(-end // self._length)):
                self._marks[block] = Mark()
        self._version = self.rows._version

    def split(self, count: int) -> list[Tensor]:
        """The blocks of the first `count` rows, as views; what is said of them holds until the next write."""
        if self.rows._version != self._version:
            self._renew()
        blocks = list(self.rows[:count].split(self._length)) if count else []
        _marks.update(zip(blocks, self._marks, strict=False))
        return blocks

    def fill(self, name: str, blocks: Sequence[Tensor], count: int) -> None:
        """Write blocks over the first `count` rows, however long each is.

        Raises ValueError, which calls them `name`, where they do not fit.
        """
        like = tuple(self.rows.shape[1:]), self.rows.dtype
        for number, block in enumerate(blocks):
            if (given := (tuple(block.shape[1:]), block.dtype)) != like:
                raise ValueError(f"a row of {name}.{number} is {given} in the state, and {like} here")
        if (total := sum(map(len, blocks))) != count:
            raise ValueError(f"{name} has {total} rows in the state, and {count} here")
        with self.writing():
            first = 0
            for block in blocks:
                self.rows[first : first + len(block)].copy_(block)
                first += len(block)

    def _renew(self) -> None:
        self._marks = [Mark() for _ in range(-(-len(self.rows) // self._length))]
        self._version = self.rows._version
