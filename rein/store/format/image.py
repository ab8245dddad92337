"""HDF5 files composed in memory: h5py writes into an array, and the disk sees finished bytes only."""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
from collections.abc import Callable
from typing import Any

import h5py
import numpy as np

from rein.store.format.files import USER_BLOCK, user_block

ALIGNMENT = 64  # bytes: a cache line, and what vectorized loads from a memory map like
_RESERVE = 16 << 20  # bytes of address space beside the data; the system gives memory for what is touched only
_LARGE = 4 << 20  # bytes of data


class Memory:
    """What h5py takes for a file, in memory. Used again and again, it costs one copy of each byte and no page faults.

    HDF5's own driver for memory (`core`) costs ten times as much. The content is `view()`, until the next `clear()`.
    """

    def __init__(self) -> None:
        self._bytes = np.empty(0, np.uint8)
        self._position = 0
        self._end = 0

    def clear(self, capacity: int = 0) -> None:
        """Forget the content and make room for `capacity` bytes of data; more may be written.

        Memory that is missing must be missed here: HDF5 can crash when a write fails.
        """
        self._position = self._end = 0
        if len(self._bytes) < capacity + _RESERVE:
            self._bytes = _pages(capacity + _RESERVE)

    def view(self) -> memoryview:
        """The bytes written, without a copy."""
        return self._bytes[: self._end].data

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """As of a file."""
        self._position = offset + (0, self._position, self._end)[whence]
        return self._position

    def tell(self) -> int:
        """As of a file."""
        return self._position

    def read(self, size: int = -1) -> bytes:
        """As of a file."""
        stop = self._end if size < 0 else min(self._position + size, self._end)
        data = self._bytes[self._position : stop].tobytes()
        self._position += len(data)
        return data

    def readinto(self, buffer: Any) -> int:
        """As of a file."""
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def write(self, data: Any) -> int:
        """As of a file; a gap before the data reads as zeros."""
        stop = self._position + len(data)
        self._reserve(stop)
        if self._position > self._end:
            self._extend(self._position)
        self._bytes.data[self._position : stop] = data
        self._position, self._end = stop, max(self._end, stop)
        return len(data)

    def truncate(self, size: int | None = None) -> int:
        """As of a file."""
        size = self._position if size is None else size
        self._extend(size)
        self._end = size
        return size

    def flush(self) -> None:
        """Nothing waits."""

    def _reserve(self, end: int) -> None:
        if end > len(self._bytes):
            grown = _pages(max(end, 2 * len(self._bytes)))
            grown[: self._end] = self._bytes[: self._end]
            self._bytes = grown

    def _extend(self, end: int) -> None:
        self._reserve(end)
        self._bytes[self._end : end] = 0  # what an earlier file left there must not reach this one
        self._end = max(self._end, end)


def _pages(size: int) -> np.ndarray:
    """Bytes that go back to the system when they are dropped, which those of malloc may not: a long run would grow."""
    private = {} if os.name == "nt" else {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS}
    pages = mmap.mmap(-1, size, **private)
    # Linux gives much memory twice as fast in large ones
    if size > _RESERVE + _LARGE and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(pages, np.uint8)


def compose(
    build: Callable[[h5py.File], Any],
    memory: Memory | None = None,
    capacity: int = 0,
    trailer: Callable[[], bytes] | None = None,
) -> memoryview:
    """The sealed file whose HDF5 part `build(file)` fills, as bytes; nothing touches the disk.

    It lies in `memory`, where given; `capacity` is about how many bytes of data there will be. What `trailer()` returns
    stands behind the HDF5 part, where HDF5 readers do not look, and the hash covers it too. Default `libver`, which
    every reader understands; contiguous datasets are aligned for memory maps.
    """
    memory = Memory() if memory is None else memory
    memory.clear(capacity)
    aligned = {"alignment_threshold": 1, "alignment_interval": ALIGNMENT}
    with h5py.File(memory, "w", userblock_size=USER_BLOCK, **aligned) as file:  # type: ignore[arg-type]  # h5py takes what is like a file
        build(file)
    if trailer is not None:
        memory.seek(0, os.SEEK_END)
        memory.write(trailer())
    content = memory.view()
    sha256 = hashlib.sha256(content[USER_BLOCK:]).hexdigest()
    content[:USER_BLOCK] = user_block(len(content) - USER_BLOCK, sha256)
    return content
