"""Datasets of one file as arrays: what is raw is mapped into memory, what is compressed is decoded on demand.

HDF5 is not asked: `rein.stores.scan` knows where the bytes lie. So nothing here can crash, everything is as safe in a
forked or spawned process as in the first one, and what a process has not touched takes no memory.
"""

from __future__ import annotations

import math
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from rein.errors import StoreError
from rein.stores.scan import Layout, Stored

Stamp = tuple[int, ...]


def stamp_of(path: Path) -> Stamp:
    """What changes when a file does. Raises StoreError where it is gone."""
    try:
        status = path.stat()
    except OSError as error:
        raise StoreError(f"{path}: cannot be read: {error.strerror}") from error
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


class MappedFile:
    """A finished file whose hash was right when its `stamp` was taken. Pickles as its path and layout."""

    def __init__(self, path: Path, stamp: Stamp, layout: Layout) -> None:
        self.path = path
        self.stamp = stamp
        self.layout = layout
        self._bytes: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_bytes": None}

    def check(self) -> None:
        """Raise StoreError if the file is not the one that was checked: to read what was cut off ends the process."""
        if stamp_of(self.path) != self.stamp:
            raise StoreError(f"{self.path}: has changed since it was opened; open the run again")

    def node(self, *path: str) -> Any:
        """The dataset or group of that path, a `Stored` or a dictionary; None where there is none."""
        found: Any = self.layout
        for name in path:
            found = found.get(name) if isinstance(found, dict) else None
        return found

    def read(self, stored: Stored, rows: slice = slice(None)) -> np.ndarray:
        """Those rows of a dataset: a read-only map where it is raw, else an array of its own.

        Raises StoreError where the file has changed or cannot be decoded.
        """
        self.check()
        if stored.is_raw:
            return self._map(stored)[rows] if stored.shape else self._map(stored)
        try:
            return self._decode(stored, rows) if stored.chunk is not None else self._map(stored)[rows] != 0
        except (ValueError, zlib.error) as error:
            raise StoreError(f"{self.path}: cannot be decoded: {error}") from error

    def field(self, path: str) -> np.ndarray:
        """All of a field as (R * N, ...): a read-only map where it is raw, else an array of its own."""
        array = np.asarray(self.read(self.node("trajectory", *path.split("/"))))
        return array.reshape(math.prod(array.shape[:2]), *array.shape[2:])

    def _map(self, stored: Stored) -> np.ndarray:
        size = math.prod(stored.shape)
        if size == 0:
            return np.empty(stored.shape, stored.dtype)
        if self._bytes is None:
            self._bytes = np.memmap(self.path, np.uint8, "r")
            if len(self._bytes) != self.stamp[2]:
                raise StoreError(f"{self.path}: was cut while it was read")
        kind = np.dtype(np.uint8) if stored.dtype.kind == "b" else stored.dtype
        raw = self._bytes[stored.offset : stored.offset + size * kind.itemsize].view(kind).reshape(stored.shape)
        return raw if kind.isnative else raw.astype(kind.newbyteorder("="))

    def _decode(self, stored: Stored, rows: slice) -> np.ndarray:
        assert stored.chunk is not None and stored.pieces is not None
        first, stop, step = rows.indices(stored.shape[0])
        if step != 1:
            raise ValueError("rows can be read one after the other only")
        decoded = np.empty((max(0, stop - first), *stored.shape[1:]), stored.dtype.newbyteorder("="))
        begin_C = stored.pieces[:, 2]
        wanted_C = (begin_C < stop) & (begin_C + stored.chunk[0] > first)
        for offset, length, *index in stored.pieces[wanted_C].tolist():
            piece = self._decode_chunk(stored, offset, length)
            skipped = max(0, first - index[0])
            target = [slice(max(0, index[0] - first), index[0] + stored.chunk[0] - first)]
            target += [slice(begin, begin + size) for begin, size in zip(index[1:], stored.chunk[1:], strict=True)]
            place = decoded[tuple(target)]
            source = (slice(skipped, skipped + len(place)), *(slice(size) for size in place.shape[1:]))
            place[...] = piece[source]
        return decoded

    def _decode_chunk(self, stored: Stored, offset: int, length: int) -> np.ndarray:
        assert stored.chunk is not None
        whole = Stored((length,), np.dtype(np.uint8), offset)
        data: Any = self._map(whole)
        size = math.prod(stored.chunk) * stored.dtype.itemsize
        if stored.deflated:
            data = zlib.decompressobj().decompress(data.data, size + 1)  # and no byte more, whatever it holds
        if len(data) != size:
            raise ValueError(f"a chunk has {len(data)} bytes where {size} are due")
        raw = np.frombuffer(data, np.uint8)
        if stored.shuffled and stored.dtype.itemsize > 1:
            raw = np.ascontiguousarray(raw.reshape(stored.dtype.itemsize, -1).T)
        if stored.dtype.kind == "b":
            return (raw != 0).reshape(stored.chunk)
        return raw.view(stored.dtype).reshape(stored.chunk)
