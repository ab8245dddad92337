"""Memory of buffers: allocation, blocks of rows, and rows packed side by side in bytes.

Shapes: N environments, B rows.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from rein.ops.trees import map_tree
from rein.types import Tree


def allocate(rows: int, row_bytes: int, storage: str, device: torch.device) -> Tensor:
    """(rows, row_bytes) of zeros as bytes, in memory or, for "memmap", in an unnamed file under `TMPDIR`.

    Raises MemoryError where more is asked for than there is, and says how much.
    """
    size = rows * row_bytes
    if storage == "memmap":
        return _mapped(size).view(rows, row_bytes)
    free = free_bytes(device)
    if free is not None and size > free:
        raise MemoryError(
            f"a replay of {rows:,} transitions needs {size:,} bytes ({row_bytes} each), and {free:,} are free on "
            f'{device}; give a smaller capacity, or storage="memmap" to keep it on disk'
        )
    return torch.zeros(rows, row_bytes, dtype=torch.uint8, device=device)


def _mapped(size: int) -> Tensor:
    with tempfile.TemporaryFile(prefix="rein-replay-") as file:
        free = os.statvfs(file.fileno())
        if size > free.f_bavail * free.f_frsize:
            left = free.f_bavail * free.f_frsize
            raise MemoryError(f"a replay of {size:,} bytes does not fit in {tempfile.gettempdir()}: {left:,} are free")
        if hasattr(os, "posix_fallocate"):  # a disk that is full only later on would be a SIGBUS
            os.posix_fallocate(file.fileno(), 0, size)
        else:
            os.truncate(file.fileno(), size)
        return torch.frombuffer(mmap.mmap(file.fileno(), size), dtype=torch.uint8)  # the map outlives the descriptor


def free_bytes(device: torch.device) -> int | None:
    """What may still be allocated there; None where nobody knows."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type != "cpu":
        return None
    try:
        with open("/proc/meminfo") as file:
            found = {line.split(":")[0]: int(line.split()[1]) << 10 for line in file if line.endswith("kB\n")}
    except OSError:
        return None
    free = found.get("MemAvailable")
    limit = _group_limit()
    return free if limit is None else limit if free is None else min(free, limit)


def _group_limit() -> int | None:
    """What is left of a container's limit (cgroup v2), files that are merely cached left out; None without one."""
    group = "/sys/fs/cgroup/memory"
    try:
        with open(f"{group}.max") as limit, open(f"{group}.current") as used, open(f"{group}.stat") as stat:
            cached = dict(line.split() for line in stat).get("inactive_file", 0)
            return int(limit.read()) - int(used.read()) + int(cached)
    except (OSError, ValueError):  # no such group, or "max"
        return None


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


_LINE = 64  # bytes that memory is fetched by
# bytes of a row, and of a batch, up to which numpy reads faster; for more torch has threads
_SMALL, _FEW = 512, 2 << 20


class Place(NamedTuple):
    """Where one tensor of a row stands in its bytes."""

    path: tuple[str, ...]  # ("observation", "camera")
    dtype: torch.dtype
    shape: tuple[int, ...]  # of one environment
    offset: int  # in bytes

    @property
    def size(self) -> int:
        """In bytes."""
        return self.dtype.itemsize * math.prod(self.shape)


class Packing:
    """How the tensors of a row (N, ...) are laid out: the wider types first, so that each is aligned."""

    def __init__(self, row: Mapping[str, Tree]) -> None:
        """`row` is an example: a tensor (N, ...), or a nested dictionary of them, for each field."""
        found = list(_leaves(row))
        self.places: list[Place] = []
        offset = 0
        for path, leaf in sorted(found, key=lambda pair: (-pair[1].dtype.itemsize, pair[0])):  # in whatever order
            place = Place(path, leaf.dtype, tuple(leaf.shape[1:]), offset)
            self.places.append(place)
            offset += place.size
        step = _LINE if offset > 2 * _LINE else 8  # a row that spans several lines begins with one
        self.row_bytes = max(step, -(-offset // step) * step)

    def like(self, num_envs: int) -> dict[str, Any]:
        """What `fits` compares a row of `num_envs` environments with."""
        looks = ((torch.Size((num_envs, *place.shape)), place.dtype) for place in self.places)
        return nest((place.path for place in self.places), looks)

    def check(self, row: Mapping[str, Tree]) -> None:
        """Raises ValueError for rows of other fields, types or shapes."""
        given = {path: (leaf.dtype, tuple(leaf.shape[1:])) for path, leaf in _leaves(row)}
        mine = {place.path: (place.dtype, place.shape) for place in self.places}
        if given == mine:
            return
        for path in {**mine, **given}:
            if given.get(path) != mine.get(path):
                name, was, now = ".".join(path), mine.get(path, "absent"), given.get(path, "absent")
                raise ValueError(f"{name} was {was} in the rows before, and is {now} now")

    def columns(self, storage: Tensor) -> dict[tuple[str, ...], Tensor]:
        """Views of bytes (..., row_bytes) as the tensors of their rows, by path."""
        return {place.path: _view(storage, place) for place in self.places}

    def fields(self, names: Sequence[str]) -> Fields:
        """How to read some fields, in the order of these. Raises ValueError for one that rows do not have."""
        known = {place.path[0] for place in self.places}
        if unknown := [name for name in names if name not in known]:
            raise ValueError(f"rows have no {', '.join(unknown)}: they have {', '.join(sorted(known))}")
        return Fields([place for name in names for place in self.places if place.path[0] == name], self.row_bytes)

    @property
    def config(self) -> list[dict[str, Any]]:
        """What the rows consist of, as JSON."""
        return [
            {"path": list(p.path), "dtype": str(p.dtype).removeprefix("torch."), "shape": list(p.shape)}
            for p in self.places
        ]


class Fields:
    """Some fields of rows, read by the rows' numbers. What can be is worked out once: batches are read often."""

    def __init__(self, places: Sequence[Place], row_bytes: int) -> None:
        self._paths = [place.path for place in places]
        self._flat = all(len(path) == 1 for path in self._paths)
        self._names = [path[0] for path in self._paths]
        self._most = _FEW // row_bytes if row_bytes <= _SMALL else 0  # rows that are read by numpy
        self._record = _record(places, row_bytes)
        self._keys = [str(k) for k in range(len(places))]
        self._odd = [(k, place.dtype) for k, place in enumerate(places) if _numpys(place.dtype) is None]
        self._views = []
        for _, dtype, shape, offset in places:
            strides = row_bytes // dtype.itemsize, *(math.prod(shape[k + 1 :]) for k in range(len(shape)))
            self._views.append((dtype, shape, strides, offset // dtype.itemsize))

    def of(self, storage: Tensor, index_B: Tensor) -> dict[str, Tree]:
        """The tensors (B, ...) of these fields of rows of `storage` (R, row_bytes), by their names, as views of a copy.

        Raises IndexError for rows that there are not; whether numbers are below 0 is not looked at.
        """
        plain = index_B.dtype is torch.int64 and index_B.ndim == 1  # of others numpy makes what torch refuses
        small = plain and len(index_B) <= self._most and storage.is_cpu
        found = self._by_numpy(storage, index_B) if small else self._by_torch(storage, index_B)
        return dict(zip(self._names, found, strict=True)) if self._flat else nest(self._paths, found)

    def _by_numpy(self, storage: Tensor, index_B: Tensor) -> list[Tensor]:
        """In two thirds of the time that `_by_torch` takes, where that goes into its operations, not their bytes."""
        rows_BX = storage.numpy().take(index_B.numpy(), 0)
        record_B = np.ndarray((len(rows_BX),), self._record, rows_BX)
        found = [torch.from_numpy(record_B[key]) for key in self._keys]
        for k, dtype in self._odd:
            found[k] = found[k].view(dtype)
        return found

    def _by_torch(self, storage: Tensor, index_B: Tensor) -> list[Tensor]:
        rows_BX = storage.index_select(0, index_B)  # by all threads
        rows, typed, found = rows_BX.shape[0], {}, []
        for dtype, shape, strides, offset in self._views:
            view = typed.get(dtype)
            if view is None:
                view = typed[dtype] = rows_BX.view(dtype)
            found.append(view.as_strided((rows, *shape), strides, offset))  # all at once: one view
        return found


def _numpys(dtype: torch.dtype) -> np.dtype | None:
    """Numpy's name of a type; None of those that it does not have, bfloat16 and its kin."""
    try:
        return torch.empty(0, dtype=dtype, device="cpu").numpy().dtype
    except TypeError:
        return None


def _record(places: Sequence[Place], row_bytes: int) -> np.dtype:
    """A row as numpy sees it; types that it does not have as integers of their size."""
    return np.dtype(
        {
            "names": [str(k) for k in range(len(places))],  # paths may be of any characters
            "formats": [(_numpys(p.dtype) or f"i{p.dtype.itemsize}", p.shape) for p in places],
            "offsets": [place.offset for place in places],
            "itemsize": row_bytes,
        }
    )


def fits(row: Mapping[str, Tree], like: Mapping[str, Any]) -> bool:
    """Whether a row has these fields, of these shapes and types, and no others; `Packing.check` says which not."""
    if len(row) != len(like):
        return False
    for name, look in like.items():
        value = row.get(name)
        if isinstance(look, dict):
            if not isinstance(value, Mapping) or not fits(value, look):
                return False
        elif not isinstance(value, Tensor) or value.shape != look[0] or value.dtype is not look[1]:
            return False
    return True


def nest(paths: Iterable[tuple[str, ...]], values: Iterable[Any]) -> dict[str, Any]:
    """Tensors, or what is said of them, by their paths as nested dictionaries."""
    tree: dict[str, Any] = {}
    for path, value in zip(paths, values, strict=True):
        *above, name = path
        node = tree
        for part in above:
            node = node.setdefault(part, {})
        node[name] = value
    return tree


def example(config: Iterable[Mapping[str, Any]]) -> dict[str, Tree]:
    """A row of no environments that `Packing` of the same `config` is made from. Raises ValueError for odd types."""
    parts, types = list(config), {str(kind): kind for kind in vars(torch).values() if isinstance(kind, torch.dtype)}
    if odd := [part["dtype"] for part in parts if f"torch.{part['dtype']}" not in types]:
        raise ValueError(f"a row holds {odd[0]!r} in the state, which is no type of tensors")
    values = (torch.empty(0, *part["shape"], dtype=types[f"torch.{part['dtype']}"], device="cpu") for part in parts)
    return nest((tuple(part["path"]) for part in parts), values)


def stack_rows(rows: Sequence[Mapping[str, Tree]]) -> dict[str, Tree]:
    """Rows (N, ...) that look alike, one after the other, (S, N, ...)."""
    first, *rest = rows
    if not rest:
        return map_tree(lambda part: part.unsqueeze(0), first)
    return map_tree(lambda *parts: torch.stack(parts), first, *rest)


def _leaves(tree: Tree, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Tensor]]:
    """Every tensor with its path: one of names, for a name may contain any character."""
    if isinstance(tree, Mapping):
        for name, value in tree.items():
            yield from _leaves(value, (*path, name))
    elif isinstance(tree, Tensor) and tree.ndim > 0:
        yield path, tree
    else:
        raise ValueError(f"{'.'.join(path)}: a field of a row is a tensor (N, ...), not {tree!r}")


def _view(storage: Tensor, place: Place) -> Tensor:
    typed = storage.narrow(-1, place.offset, place.size).view(place.dtype)
    return typed.unflatten(-1, place.shape) if place.shape else typed.squeeze(-1)
