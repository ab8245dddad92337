"""Memory of buffers: allocation, blocks of rows, and rows packed side by side in bytes.

Shapes: N environments, B rows.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from rein.ops.trees import leaves, map_tree
from rein.types import Tree


def allocate(rows: int, row_bytes: int, storage: str, device: torch.device) -> Tensor:
    """Return zeros (rows, row_bytes) uint8, in memory or, for "memmap", in an unnamed file under `TMPDIR`.

    Raises MemoryError, with the number of bytes, if they do not fit.
    """
    size = rows * row_bytes
    if storage == "memmap":
        return _mapped(size).view(rows, row_bytes)
    free = free_bytes(device)
    if free is not None and size > free:
        raise MemoryError(
            f"a replay of {rows:,} transitions needs {size:,} bytes ({row_bytes} each), but {free:,} are free on "
            f'{device}; use a smaller capacity, or storage="memmap" to keep it on disk'
        )
    return torch.zeros(rows, row_bytes, dtype=torch.uint8, device=device)


def _mapped(size: int) -> Tensor:
    with tempfile.TemporaryFile(prefix="rein-replay-") as file:
        folder = tempfile.gettempdir()
        if size > (free := shutil.disk_usage(folder).free):
            raise MemoryError(f"a replay of {size:,} bytes does not fit in {folder}: {free:,} are free")
        if hasattr(os, "posix_fallocate"):  # a disk that fills up later would raise SIGBUS
            os.posix_fallocate(file.fileno(), 0, size)
        else:
            os.truncate(file.fileno(), size)
        return torch.frombuffer(mmap.mmap(file.fileno(), size), dtype=torch.uint8)  # the map outlives the descriptor


def free_bytes(device: torch.device) -> int | None:
    """Return the free memory of a device in bytes, or None if it is unknown."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type != "cpu":
        return None
    try:
        with open("/proc/meminfo") as file:
            sizes = {line.split(":")[0]: int(line.split()[1]) << 10 for line in file if line.endswith("kB\n")}
    except OSError:
        return None
    free = sizes.get("MemAvailable")
    limit = _group_limit()
    return free if limit is None else limit if free is None else min(free, limit)


def _group_limit() -> int | None:
    """Return the free bytes within the container's limit (cgroup v2), without the file cache; None without a limit."""
    group = "/sys/fs/cgroup/memory"
    try:
        with open(f"{group}.max") as limit, open(f"{group}.current") as used, open(f"{group}.stat") as stat:
            cached = dict(line.split() for line in stat).get("inactive_file", 0)
            return int(limit.read()) - int(used.read()) + int(cached)
    except (OSError, ValueError):  # no cgroup, or the limit is "max"
        return None


BLOCK = 4 << 20  # bytes that a checkpoint rewrites if a single row is new


class Mark:
    """Version of a block: two tensors with the same mark have the same bytes."""

    __slots__ = ("__weakref__",)


def mark_of(tensor: Tensor) -> Mark | None:
    """Return the mark of a block, or None for other tensors."""
    return _marks.get(tensor)


_marks: MutableMapping[Tensor, Mark] = WeakTensorKeyDictionary()  # not an attribute, which would be pickled and copied


class Blocks:
    """Rows (R, ...) in blocks of at most `BLOCK` bytes, each with a mark that changes when the block is written.

    Write rows within `writing`. Any other write by a torch operation is detected, and changes all marks.
    """

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows
        self._length = max(1, BLOCK // max(1, math.prod(rows.shape[1:]) * rows.element_size()))  # rows per block
        self._renew()

    @contextlib.contextmanager
    def writing(self, first: int = 0, last: int | None = None) -> Iterator[None]:
        """Context manager for writes to the rows from `first` up to `last`, exclusive. Rows past the end wrap to 0."""
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
        """Return views of the blocks of the first `count` rows. Their marks are valid until the next write."""
        if self.rows._version != self._version:
            self._renew()
        blocks = list(self.rows[:count].split(self._length)) if count else []
        _marks.update(zip(blocks, self._marks, strict=False))
        return blocks

    def fill(self, name: str, blocks: Sequence[Tensor], count: int) -> None:
        """Write blocks of any lengths to the first `count` rows.

        Raises ValueError, with `name` in the message, if they do not fit.
        """
        expected = tuple(self.rows.shape[1:]), self.rows.dtype
        for number, block in enumerate(blocks):
            if (saved := (tuple(block.shape[1:]), block.dtype)) != expected:
                raise ValueError(f"a row of {name}.{number} in the state is {saved}, not {expected}")
        if (total := sum(map(len, blocks))) != count:
            raise ValueError(f"{name} in the state has {total} rows, not {count}")
        with self.writing():
            first = 0
            for block in blocks:
                self.rows[first : first + len(block)].copy_(block)
                first += len(block)

    def _renew(self) -> None:
        self._marks = [Mark() for _ in range(-(-len(self.rows) // self._length))]
        self._version = self.rows._version


_LINE = 64  # bytes of a cache line
# largest sizes in bytes of a row and of a batch for which numpy is faster; torch uses threads for larger ones
_SMALL, _FEW = 512, 2 << 20


class Place(NamedTuple):
    """Position of one tensor within the bytes of a row."""

    path: tuple[str, ...]  # ("observation", "camera")
    dtype: torch.dtype
    shape: tuple[int, ...]  # of one environment
    offset: int  # in bytes

    @property
    def size(self) -> int:
        """Size in bytes."""
        return self.dtype.itemsize * math.prod(self.shape)


class Packing:
    """Layout of the tensors of a row (N, ...) in bytes. Wider dtypes come first, so that each tensor is aligned."""

    def __init__(self, row: Mapping[str, Tree]) -> None:
        """`row` is an example row: for each field a tensor (N, ...) or a nested dictionary of them."""
        tensors = list(_leaves(row))
        self.places: list[Place] = []
        offset = 0
        for path, leaf in sorted(tensors, key=lambda pair: (-pair[1].dtype.itemsize, pair[0])):
            place = Place(path, leaf.dtype, tuple(leaf.shape[1:]), offset)
            self.places.append(place)
            offset += place.size
        step = _LINE if offset > 2 * _LINE else 8  # a row longer than two lines is aligned to lines
        self.row_bytes = max(step, -(-offset // step) * step)

    def like(self, num_envs: int) -> dict[str, Any]:
        """Return the shapes and dtypes of a row of `num_envs` environments, for `fits`."""
        looks = ((torch.Size((num_envs, *place.shape)), place.dtype) for place in self.places)
        return nest((place.path for place in self.places), looks)

    def check(self, row: Mapping[str, Tree]) -> None:
        """Raise ValueError if fields, dtypes or shapes of a row differ."""
        received = {path: (leaf.dtype, tuple(leaf.shape[1:])) for path, leaf in _leaves(row)}
        expected = {place.path: (place.dtype, place.shape) for place in self.places}
        if received == expected:
            return
        for path in {**expected, **received}:
            if received.get(path) != expected.get(path):
                name, was, now = ".".join(path), expected.get(path, "absent"), received.get(path, "absent")
                raise ValueError(f"{name} is {now}, but was {was} in earlier rows")

    def columns(self, storage: Tensor) -> dict[tuple[str, ...], Tensor]:
        """Return views of bytes (..., row_bytes) as the tensors of their rows, by path."""
        return {place.path: _view(storage, place) for place in self.places}

    def fields(self, names: Sequence[str]) -> Fields:
        """Return a reader of some fields, in this order. Raises ValueError if the rows do not have a field."""
        recorded = {place.path[0] for place in self.places}
        if unknown := [name for name in names if name not in recorded]:
            raise ValueError(f"the rows have no {', '.join(unknown)}; their fields are {', '.join(sorted(recorded))}")
        return Fields([place for name in names for place in self.places if place.path[0] == name], self.row_bytes)

    @property
    def config(self) -> list[dict[str, Any]]:
        """The fields of the rows, as JSON."""
        return [
            {"path": list(p.path), "dtype": str(p.dtype).removeprefix("torch."), "shape": list(p.shape)}
            for p in self.places
        ]


class Fields:
    """Reader of some fields of rows by row number. The views are computed once, because batches are read often."""

    def __init__(self, places: Sequence[Place], row_bytes: int) -> None:
        self._paths = [place.path for place in places]
        self._flat = all(len(path) == 1 for path in self._paths)
        self._names = [path[0] for path in self._paths]
        self._most = _FEW // row_bytes if row_bytes <= _SMALL else 0  # most rows to read with numpy
        self._record = _record(places, row_bytes)
        self._keys = [str(k) for k in range(len(places))]
        self._odd = [(k, place.dtype) for k, place in enumerate(places) if _numpys(place.dtype) is None]
        self._views = []
        for _, dtype, shape, offset in places:
            strides = row_bytes // dtype.itemsize, *(math.prod(shape[k + 1 :]) for k in range(len(shape)))
            self._views.append((dtype, shape, strides, offset // dtype.itemsize))

    def of(self, storage: Tensor, index_B: Tensor) -> dict[str, Tree]:
        """Copy rows of `storage` (R, row_bytes) and return views (B, ...) of the fields by name.

        Raises IndexError if a row is beyond the last one. Negative rows are not checked.
        """
        plain = index_B.dtype is torch.int64 and index_B.ndim == 1  # numpy accepts others, which torch refuses
        small = plain and len(index_B) <= self._most and storage.is_cpu
        tensors = self._by_numpy(storage, index_B) if small else self._by_torch(storage, index_B)
        return dict(zip(self._names, tensors, strict=True)) if self._flat else nest(self._paths, tensors)

    def _by_numpy(self, storage: Tensor, index_B: Tensor) -> list[Tensor]:
        """Read with numpy, in two thirds of the time of `_by_torch` for small batches."""
        rows_BX = storage.numpy().take(index_B.numpy(), 0)
        record_B = np.ndarray((len(rows_BX),), self._record, rows_BX)
        tensors = [torch.from_numpy(record_B[key]) for key in self._keys]
        for k, dtype in self._odd:
            tensors[k] = tensors[k].view(dtype)
        return tensors

    def _by_torch(self, storage: Tensor, index_B: Tensor) -> list[Tensor]:
        rows_BX = storage.index_select(0, index_B)  # uses all threads
        rows, typed, tensors = rows_BX.shape[0], {}, []
        for dtype, shape, strides, offset in self._views:
            view = typed.get(dtype)
            if view is None:
                view = typed[dtype] = rows_BX.view(dtype)
            tensors.append(view.as_strided((rows, *shape), strides, offset))  # one view, not three
        return tensors


def _numpys(dtype: torch.dtype) -> np.dtype | None:
    """Return numpy's dtype of a torch dtype, or None if numpy does not have it, such as bfloat16."""
    try:
        return torch.empty(0, dtype=dtype, device="cpu").numpy().dtype
    except TypeError:
        return None


def _record(places: Sequence[Place], row_bytes: int) -> np.dtype:
    """Return the numpy record dtype of a row. Dtypes that numpy does not have become integers of their size."""
    return np.dtype(
        {
            "names": [str(k) for k in range(len(places))],  # paths may have any characters
            "formats": [(_numpys(p.dtype) or f"i{p.dtype.itemsize}", p.shape) for p in places],
            "offsets": [place.offset for place in places],
            "itemsize": row_bytes,
        }
    )


def fits(row: Mapping[str, Tree], like: Mapping[str, Any]) -> bool:
    """Whether a row has exactly these fields, shapes and dtypes. `Packing.check` raises with the difference."""
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
    """Return values by path as nested dictionaries."""
    tree: dict[str, Any] = {}
    for path, value in zip(paths, values, strict=True):
        *above, name = path
        node = tree
        for part in above:
            node = node.setdefault(part, {})
        node[name] = value
    return tree


def example(config: Iterable[Mapping[str, Any]]) -> dict[str, Tree]:
    """Return a row of no environments whose `Packing` has this `config`. Raises ValueError for unknown dtypes."""
    parts, types = list(config), {str(kind): kind for kind in vars(torch).values() if isinstance(kind, torch.dtype)}
    if unknown := [part["dtype"] for part in parts if f"torch.{part['dtype']}" not in types]:
        raise ValueError(f"the state has a field of the unknown dtype {unknown[0]!r}")
    values = (torch.empty(0, *part["shape"], dtype=types[f"torch.{part['dtype']}"], device="cpu") for part in parts)
    return nest((tuple(part["path"]) for part in parts), values)


def stack_rows(rows: Sequence[Mapping[str, Tree]]) -> dict[str, Tree]:
    """Stack rows (N, ...) to (S, N, ...)."""
    first, *rest = rows
    if not rest:
        return map_tree(lambda part: part.unsqueeze(0), first)
    return map_tree(lambda *parts: torch.stack(parts), first, *rest)


def _leaves(tree: Tree, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Tensor]]:
    """Iterate over tensors and their paths. Paths are tuples, because names may contain any character."""
    if isinstance(tree, Mapping):
        for name, value in tree.items():
            yield from _leaves(value, (*path, name))
    elif isinstance(tree, Tensor) and tree.ndim > 0:
        yield path, tree
    else:
        raise ValueError(f"{'.'.join(path)}: a field of a row must be a tensor (N, ...), not {tree!r}")


def _view(storage: Tensor, place: Place) -> Tensor:
    typed = storage.narrow(-1, place.offset, place.size).view(place.dtype)
    return typed.unflatten(-1, place.shape) if place.shape else typed.squeeze(-1)


def without_rows(state: Any) -> tuple[Any, int]:
    """Return the tree of a state with empty replays, and the number of bytes of the replays."""
    if isinstance(state, Mapping) and {"filled", "blocks"} <= state.keys():
        return {"filled": 0}, sum(leaf.nbytes for _, leaf in leaves(state) if isinstance(leaf, Tensor))
    if not isinstance(state, Mapping | list):
        return state, 0
    parts = {
        key: without_rows(part) for key, part in (state.items() if isinstance(state, Mapping) else enumerate(state))
    }
    size = sum(bytes_ for _, bytes_ in parts.values())
    if not size:
        return state, 0
    lighter = {key: part for key, (part, _) in parts.items()}
    return (lighter if isinstance(state, Mapping) else [*lighter.values()]), size
