"""Chunks as HDF5's shuffle and gzip filters make them, in half of their time for the numbers of reinforcement learning.

Actions and flags are small whole numbers in wide types, so nearly all of their bytes are zeros. HDF5 moves each of them
into its place and searches it for repetitions; here they are never touched.

Shapes: V values of a chunk, W bytes of a value, B bytes of a value that are not zero throughout the chunk.
"""

from __future__ import annotations

import functools
import sys
import zlib

import numpy as np

_LEVEL = 1
_HEADER = b"\x78\x01"  # of zlib's format (RFC 1950): deflate, a window of 32 KiB, the fastest level
_MODULUS = 65521  # of Adler-32


def compress(chunk: np.ndarray) -> bytes:
    """A whole contiguous chunk, shuffled and deflated: HDF5 reads it by the filters of those names."""
    values_V = chunk.reshape(-1)
    used, filler = _used_bytes(values_V)
    if used == 1 and values_V.dtype.kind in "iu":
        head_BV = values_V.astype(np.uint8)  # the lowest byte
    else:
        head_BV = np.ascontiguousarray(values_V.view(np.uint8).reshape(len(values_V), -1)[:, :used].T)
    rest = values_V.nbytes - head_BV.nbytes
    deflate = zlib.compressobj(_LEVEL, zlib.DEFLATED, -zlib.MAX_WBITS)
    # what is flushed ends with a whole byte, and the constant rest refers to nothing before it
    body = deflate.compress(head_BV.data) + deflate.flush(zlib.Z_SYNC_FLUSH if rest else zlib.Z_FINISH)
    checksum = _adler32(zlib.adler32(head_BV.data), filler, rest)
    return _HEADER + body + (_constant(filler, rest) if rest else b"") + checksum.to_bytes(4, "big")


def _used_bytes(values_V: np.ndarray) -> tuple[int, int]:
    """How many bytes of each value, from the lowest on, have to be looked at, and what all others are."""
    width = values_V.itemsize
    if values_V.dtype.kind not in "iub" or not values_V.dtype.isnative or sys.byteorder != "little":
        return width, 0
    low, high = int(values_V.min()), int(values_V.max())
    if width == 1 and low == high:
        return 0, high & 0xFF
    return width if low < 0 else (high.bit_length() + 7) // 8, 0


@functools.lru_cache(32)
def _constant(value: int, size: int) -> bytes:
    """The end of a deflate stream: `size` times that byte."""
    deflate = zlib.compressobj(_LEVEL, zlib.DEFLATED, -zlib.MAX_WBITS)
    return deflate.compress(bytes([value]) * size) + deflate.flush()


def _adler32(before: int, value: int, size: int) -> int:
    """The checksum of data whose checksum was `before` and `size` times the byte `value` (RFC 1950, section 9)."""
    first, second = before & 0xFFFF, before >> 16
    second += size * first + value * (size * (size + 1) // 2)
    first += size * value
    return second % _MODULUS << 16 | first % _MODULUS
