"""Read one trajectory file: its datasets as arrays, and the tables of epochs and episodes, checked against the rows.

Raw datasets are memory-mapped, compressed ones are decoded on demand. Positions come from the layout of the file
(`rein.store.format.layout`), so HDF5 is not called. Forked and spawned processes can read safely. Memory is used only
for the parts that are read.

Shapes: R rows of the file, K epochs, E episodes.
"""

from __future__ import annotations

import collections
import ctypes
import errno
import functools
import json
import math
import mmap
import os
import sys
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from rein.errors import StoreError
from rein.files import open_file
from rein.ops.trees import leaves, map_tree
from rein.replay.storage import free_bytes
from rein.store.format import sealed
from rein.store.format.layout import CHUNK, Stored, Tree, read_layout
from rein.store.format.nexus import decode_name

Table = dict[str, Any]  # name -> column, all of the same length; `metrics` and `clocks` are nested tables

EPOCHS = ("number", "first_row", "length", "first_step", "part", "parts")
EPISODES = {name: "i" for name in ("id", "environment", "first_step", "last_step", "seed", "length", "epoch")}
EPISODES |= {"return": "f", "terminated": "b", "truncated": "b"}

MISREAD = (KeyError, ValueError, TypeError, AttributeError, IndexError)  # raised for files of unexpected content

_FLAGS = {"valid", "terminated", "truncated"}
_STATUS = 64  # bytes
_STEPS = 2**60  # sums of smaller steps do not overflow


Stamp = tuple[int, ...]

_MAPS = 1024  # maximum number of mapped files; Linux allows a process 65,530 maps
_PAGE = 4096  # bytes; smaller arrays are copied, so that they do not keep a map alive
_CHUNKS = 32  # number of decoded chunks in the cache
_LARGE = 64 << 20  # bytes; reads that decode more check the free memory first
_ADVICE = {
    errno.EMFILE: "; close files of this process or raise its limit (`ulimit -n`)",
    errno.ENFILE: "; the limit of open files of the machine is reached (`sysctl fs.file-max`)",
    errno.ENOMEM: "; keep fewer arrays of other files or allow more maps (`sysctl vm.max_map_count`)",
}

_mapped: collections.deque[weakref.ref[MappedFile]] = collections.deque()  # oldest first
_decoded: collections.OrderedDict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = collections.OrderedDict()


def stamp_of(path: Path) -> Stamp:
    """Return device, inode, size and modification time, which change with the file. Raises StoreError if it is gone."""
    try:
        status = path.lstat()
    except OSError as error:
        raise StoreError(f"{path}: cannot be read: {error.strerror}") from error
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


class MappedFile:
    """Finished file whose hash was correct when its `stamp` was taken. Pickling saves its path, stamp and layout."""

    def __init__(self, path: Path, stamp: Stamp, layout: Tree) -> None:
        self.path = path
        self.stamp = stamp
        self.layout = layout
        self._bytes: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_bytes": None}

    def unmap(self) -> None:
        """Release the memory map until the next read. Existing arrays keep theirs."""
        self._bytes = None

    def check(self) -> None:
        """Raise StoreError if the file has changed, because reading a map of a truncated file kills the process."""
        if stamp_of(self.path) != self.stamp:
            raise StoreError(f"{self.path}: has changed since it was opened; open the run again")

    def node(self, *path: str) -> Any:
        """Return a dataset (`Stored`) or a group (dictionary) by path, or None if it does not exist."""
        node: Any = self.layout
        for name in path:
            node = node.get(name) if isinstance(node, dict) else None
        return node

    def read(self, stored: Stored, rows: slice = slice(None)) -> np.ndarray:
        """Return rows of a dataset: a read-only map if it is raw (a copy if it is small), otherwise a new array.

        Raises StoreError if the file has changed, cannot be mapped or decoded, or needs more than the free memory.
        """
        self.check()
        if stored.is_raw:
            part = self._map(stored)[rows] if stored.shape else self._map(stored)
            if part.nbytes < _PAGE:
                part = part.copy()
                part.flags.writeable = False
            return part
        try:
            return self._decode(stored, rows) if stored.chunk is not None else self._map(stored)[rows] != 0
        except (ValueError, MemoryError, zlib.error) as error:
            raise StoreError(f"{self.path}: cannot be decoded: {error}") from error

    def field(self, path: str) -> np.ndarray:
        """Return a complete field as (R * N, ...): a read-only map if it is raw, otherwise a new array."""
        array = np.asarray(self.read(self.node("trajectory", *path.split("/"))))
        return array.reshape(math.prod(array.shape[:2]), *array.shape[2:])

    def _map(self, stored: Stored) -> np.ndarray:
        size = math.prod(stored.shape)
        if size == 0:
            return np.empty(stored.shape, stored.dtype)
        kind = np.dtype(np.uint8) if stored.dtype.kind == "b" else stored.dtype
        raw = self._whole()[stored.offset : stored.offset + size * kind.itemsize].view(kind).reshape(stored.shape)
        return raw if kind.isnative else raw.astype(kind.newbyteorder("="))

    def _whole(self) -> np.ndarray:
        """Map all bytes of the file. Raises StoreError if that fails."""
        whole = self._bytes
        if whole is None:
            try:
                with open_file(self.path, buffering=0) as file:
                    if os.fstat(file.fileno()).st_size != self.stamp[2]:
                        raise StoreError(f"{self.path}: was truncated while it was read")
                    whole = _map_file(file.fileno(), self.stamp[2])
            except OSError as error:
                advice = _ADVICE.get(error.errno or 0, "")
                raise StoreError(
                    f"{self.path}: cannot be mapped into memory: {sealed.reason_of(error)}{advice}"
                ) from error
            self._bytes = whole
            _mapped.append(weakref.ref(self))
            while len(_mapped) > _MAPS:
                if (first := _mapped.popleft()()) is not None:
                    first.unmap()
        return whole

    def _decode(self, stored: Stored, rows: slice) -> np.ndarray:
        assert stored.chunk is not None and stored.pieces is not None
        first, stop, step = rows.indices(stored.shape[0])
        if step != 1:
            raise ValueError(f"rows must be contiguous, got the step {step}")
        shape = (max(0, stop - first), *stored.shape[1:])
        _check_memory(math.prod(shape) * stored.dtype.itemsize)
        decoded = np.empty(shape, stored.dtype.newbyteorder("="))
        begin_C = stored.pieces[:, 2]
        wanted_C = (begin_C < stop) & (begin_C + stored.chunk[0] > first)
        for offset, length, *index in stored.pieces[wanted_C].tolist():
            part = index[0] < first or stop < min(index[0] + stored.chunk[0], stored.shape[0])
            piece = self._cached_chunk(stored, offset, length) if part else self._decode_chunk(stored, offset, length)
            skipped = max(0, first - index[0])
            target = [slice(max(0, index[0] - first), index[0] + stored.chunk[0] - first)]
            target += [slice(begin, begin + size) for begin, size in zip(index[1:], stored.chunk[1:], strict=True)]
            place = decoded[tuple(target)]
            source = (slice(skipped, skipped + len(place)), *(slice(size) for size in place.shape[1:]))
            place[...] = piece[source]
        return decoded

    def _cached_chunk(self, stored: Stored, offset: int, length: int) -> np.ndarray:
        """Return a chunk of which a part is read, from the cache or decoded.

        The next read usually wants the following rows of the same chunk. The same `pieces` imply a layout with the same
        hash, and therefore the same bytes. The cache has no lock, because a process may be forked at any time. A chunk
        that another thread evicts meanwhile is decoded again.
        """
        assert stored.pieces is not None
        key = id(stored.pieces), offset  # the cache keeps `pieces` alive, so the id is unique
        held = _decoded.pop(key, None)
        if held is None:
            held = stored.pieces, self._decode_chunk(stored, offset, length)
        if held[1].nbytes <= CHUNK:
            _decoded[key] = held
            while len(_decoded) > _CHUNKS:
                _decoded.popitem(last=False)
        return held[1]

    def _decode_chunk(self, stored: Stored, offset: int, length: int) -> np.ndarray:
        assert stored.chunk is not None
        whole = Stored((length,), np.dtype(np.uint8), offset)
        data: Any = self._map(whole)
        size = math.prod(stored.chunk) * stored.dtype.itemsize
        _check_memory(size)
        data = zlib.decompressobj().decompress(data.data, size + 1)  # bounded, since the file may be hostile
        if len(data) != size:
            raise ValueError(f"a chunk has {len(data)} bytes instead of {size}")
        raw = np.frombuffer(data, np.uint8)
        if stored.dtype.itemsize > 1:
            raw = np.ascontiguousarray(raw.reshape(stored.dtype.itemsize, -1).T)
        if stored.dtype.kind == "b":
            return (raw != 0).reshape(stored.chunk)
        return raw.view(stored.dtype).reshape(stored.chunk)


def _check_memory(size: int) -> None:
    if size > _LARGE:
        free = free_bytes(torch.device("cpu"))
        if free is not None and size > free:
            raise MemoryError(f"it takes {size:,} bytes but only {free:,} bytes of memory are free; read fewer rows")


def _map_file(descriptor: int, size: int) -> np.ndarray:
    """Map the bytes of a file read-only, as long as an array uses them. Raises OSError if the system refuses."""
    try:
        if sys.platform == "win32":
            return np.frombuffer(mmap.mmap(descriptor, size, access=mmap.ACCESS_READ), np.uint8)
        if sys.version_info >= (3, 13):
            return np.frombuffer(mmap.mmap(descriptor, size, access=mmap.ACCESS_READ, trackfd=False), np.uint8)
    except ValueError as error:  # the file is shorter
        raise OSError(errno.EINVAL, str(error)) from error
    return np.asarray(_Map(descriptor, size))


class _Map:
    """Memory map that keeps no file descriptor.

    Before Python 3.13, `mmap` keeps one descriptor per map, and processes are often limited to 1,024. The map is
    released together with the last array that uses it.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        self._address = None
        call, self._unmap = _map_calls()
        address = call(None, size, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
        if address == ctypes.c_void_p(-1).value:  # MAP_FAILED
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        self._address, self._size = address, size
        self.__array_interface__ = {"data": (address, True), "shape": (size,), "typestr": "|u1", "version": 3}

    def __del__(self) -> None:
        if self._address is not None:
            self._unmap(self._address, self._size)


@functools.cache
def _map_calls() -> tuple[Any, Any]:
    """Return the system's `mmap` and `munmap`."""
    library = ctypes.CDLL(None, use_errno=True)
    call, end = library.mmap, library.munmap
    call.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]  # off_t is a long
    call.restype = ctypes.c_void_p
    end.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return call, end


class Content(NamedTuple):
    """File with its tables, and its fields by path; each (R, N, ...)."""

    file: MappedFile
    epochs: Table
    episodes: Table
    fields: dict[str, Stored]

    @property
    def num_envs(self) -> int:
        """N, or 0 without fields."""
        return next((stored.shape[1] for stored in self.fields.values()), 0)

    @property
    def rows(self) -> int:
        """R."""
        return int(self.epochs["length"].sum())


def _read_content(file: MappedFile) -> Content:
    """Return the tables of a file. Raises ValueError, KeyError, ... if the datasets are not those of rein."""
    table = file.layout["epochs"]
    epochs: Table = {name: _column(file, table, name, "i") for name in EPOCHS}
    if isinstance(status := table["status"], Stored) and status.dtype.itemsize > _STATUS:
        raise ValueError("the column 'status' is invalid")  # as a string it would take four times its bytes
    epochs["status"] = _column(file, table, "status", "S").astype(str)
    for kind in ("metrics", "clocks"):
        epochs[kind] = {decode_name(name): _column(file, table[kind], name, "f") for name in table[kind]}
    table = file.layout["episodes"]
    episodes = {name: _column(file, table, name, kind) for name, kind in EPISODES.items()}
    empty = np.zeros(len(episodes["id"]), "S1")
    episodes["options"] = _column(file, table, "options", "S") if "options" in table else empty
    content = Content(file, epochs, episodes, dict(_fields(file.layout["trajectory"])))
    _check(content)
    return content


def _column(file: MappedFile, table: Any, name: str, kind: str) -> np.ndarray:
    stored = table[name]
    if not isinstance(stored, Stored) or len(stored.shape) != 1 or stored.dtype.kind != kind:
        raise ValueError(f"the column {name!r} is invalid")
    return np.array(file.read(stored))  # a copy, so that the file need not stay mapped


def _fields(node: Any, path: str = "") -> Iterator[tuple[str, Stored]]:
    for name, child in node.items():
        where = f"{path}/{name}" if path else name
        yield from [(where, child)] if isinstance(child, Stored) else _fields(child, where)


def _check(content: Content) -> None:
    epochs, episodes = content.epochs, content.episodes
    number, length, part, parts = (epochs[name] for name in ("number", "length", "part", "parts"))
    if not len(number) or len({len(column) for _, column in leaves(epochs)}) != 1:
        raise ValueError("its table of epochs is empty or has columns of different lengths")
    cut = parts[0] != 1
    if number[0] < 1 or (np.diff(number) <= 0).any() or (cut and len(number) > 1):
        raise ValueError("its epochs are out of order")
    if not ((part >= 1) & (part <= parts) & (parts == parts[0])).all():
        raise ValueError("its part numbers are invalid")
    if (length < 0).any() or (length > 2**40).any() or (epochs["first_row"] != np.cumsum(length) - length).any():
        raise ValueError("its epochs are not contiguous")
    for path, stored in content.fields.items():
        if len(stored.shape) < 2 or stored.shape[:2] != (content.rows, content.num_envs) or stored.dtype.kind == "S":
            raise ValueError(f"the field {path} does not fit the table of epochs")
    if (abs(epochs["first_step"].astype(np.float64)) > _STEPS).any():
        raise ValueError("its epochs begin at invalid steps")
    for name in _FLAGS & content.file.layout["trajectory"].keys():
        stored = content.fields.get(name)
        if stored is None or len(stored.shape) != 2 or (name == "valid" and stored.dtype.kind != "b"):
            raise ValueError(f"the field {name} is not a flag of every row")
    if content.rows and not content.num_envs:
        raise ValueError("it has rows but no fields or no environments")
    if len({len(column) for column in episodes.values()}) != 1:
        raise ValueError("its table of episodes has columns of different lengths")
    if (episodes["environment"] < 0).any():  # NumPy would count from the end
        raise ValueError("an episode has a negative environment")
    _check_observations(content, content.file.node("episodes", "final_observation"), (len(episodes["id"]),))
    _check_observations(content, content.file.node("epochs", "next_observation"), (len(number), content.num_envs))


def _check_observations(content: Content, node: Any, lead: tuple[int, ...]) -> None:
    """Check that final or next observations have the leading shape `lead`, and dtype and shape of the rows'."""
    observed = content.file.node("trajectory", "observation")
    others, rows = ({p: s for p, s in _fields({} if n is None else {"": n})} for n in (node, observed))
    if any(stored.shape[:1] != lead[:1] for stored in others.values()):
        raise ValueError("its final or next observations do not fit its tables")
    if node is None or observed is None:
        return
    if others.keys() != rows.keys() or any(
        s.shape != (*lead, *rows[p].shape[2:]) or s.dtype != rows[p].dtype for p, s in others.items()
    ):
        raise ValueError("its final or next observations do not fit its observations")


def read_options(text: bytes) -> dict[str, Any] | None:
    """Return the reset options of an episode, or None. Raises ValueError if they are not a JSON dictionary."""
    try:
        options = json.loads(text) if text else None
    except (ValueError, RecursionError):
        options = text
    if options is not None and not isinstance(options, dict):
        raise ValueError(f"its reset options are not a JSON dictionary: {options!r:.80}")
    return options


def read_tree(node: Any, read: Callable[[Stored], np.ndarray]) -> Any:
    """Apply `read` to a dataset, or to all datasets of a group, which gives a dictionary."""
    return {name: read_tree(child, read) for name, child in node.items()} if isinstance(node, dict) else read(node)


def join(tables: Sequence[Table], sizes: Sequence[int] | None = None) -> Table:
    """Concatenate tables. Missing columns are filled with NaN."""
    sizes = sizes or [len(next(iter(table.values()))) for table in tables]
    joined: Table = {}
    for name in dict.fromkeys(name for table in tables for name in table):
        columns = [table.get(name) for table in tables]
        if any(isinstance(column, dict) for column in columns):
            joined[name] = join([column or {} for column in columns], sizes)
        else:
            filled = [np.full(n, np.nan) if c is None else c for c, n in zip(columns, sizes, strict=True)]
            joined[name] = np.concatenate(filled)
    return joined


def take_rows(table: Table, rows: Any) -> Table:
    """Return these rows of a table."""
    return map_tree(lambda column: column[rows], table)


def open_content(path: Path) -> Content:
    """Check the hash, the layout and the tables of a file, and return the tables. Raises StoreError."""
    stamp = stamp_of(path)
    sealed.verify(path)
    file = MappedFile(path, stamp, read_layout(path))
    try:
        return _read_content(file)
    except MISREAD as error:
        raise StoreError(f"{path}: is not a valid trajectory file: {error}") from error
    finally:
        file.unmap()  # the tables are copies, and often nothing else of a file is read
