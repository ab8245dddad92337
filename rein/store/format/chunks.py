"""Chunks as HDF5's shuffle and gzip filters make them, in half of their time for the numbers of reinforcement learning.

Actions and flags are small whole numbers in wide types, so nearly all of their bytes are zeros. HDF5 moves each of them
into its place and searches it for repetitions; here they are never touched. Where actions show no repetitions, nobody
looks for them either: each gets a code of two to four bits.

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
_WIDEST = 4  # bits; of wider codes deflate's own, of different lengths, are better
_SAMPLES, _SAMPLE = 4, 2048  # so many of so many bytes
_WORTH = 0.85  # codes of one width may be that much larger than what a search for repetitions makes of any sample
_LENGTHS = (16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2)  # the order in which RFC 1951, 3.2.7 has them
_EMPTY = b"\0\0\xff\xff"  # the length of a stored block without bytes


def compress(chunk: np.ndarray) -> bytes:
    """A whole contiguous chunk, shuffled and deflated: HDF5 reads it by the filters of those names."""
    values_V = chunk.reshape(-1)
    used, filler = _used_bytes(values_V)
    if used == 1 and values_V.dtype.kind in "iu":
        head_BV = values_V.astype(np.uint8)  # the lowest byte
    else:
        head_BV = np.ascontiguousarray(values_V.view(np.uint8).reshape(len(values_V), -1)[:, :used].T)
    rest = values_V.nbytes - head_BV.nbytes
    body = _deflate(head_BV.reshape(-1), last=not rest)
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


def _deflate(bytes_V: np.ndarray, last: bool) -> bytes:
    """A deflate stream, or the beginning of one: it ends with a whole byte, and what comes next refers to nothing."""
    width = max(2, (int(bytes_V.max(initial=0)) + 1).bit_length())
    if width <= _WIDEST and len(bytes_V) >= 2 * _SAMPLES * _SAMPLE:
        starts = np.linspace(0, len(bytes_V) - _SAMPLE, _SAMPLES, dtype=np.int64).tolist()  # what was at first may end
        if all(
            len(zlib.compress(bytes_V[a : a + _SAMPLE].data, _LEVEL)) >= _WORTH * _SAMPLE * width / 8 for a in starts
        ):
            return _in_one_width(bytes_V, width, last)
    deflate = zlib.compressobj(_LEVEL, zlib.DEFLATED, -zlib.MAX_WBITS)
    return deflate.compress(bytes_V.data) + deflate.flush(zlib.Z_FINISH if last else zlib.Z_SYNC_FLUSH)


def _in_one_width(bytes_V: np.ndarray, width: int, last: bool) -> bytes:
    """The same, with a code of `width` bits for each byte, all of which are below 2**width - 1."""
    bits = np.empty((len(bytes_V), width), np.uint8)
    for place in range(width):  # codes begin with their highest bit
        np.bitwise_and(bytes_V >> (width - 1 - place), 1, out=bits[:, place])
    end = np.array([1] * width + [last, 0, 0], np.uint8)  # the code of the end, and the head of a stored block
    stream = np.concatenate([_codes(width), bits.reshape(-1), end])
    return np.packbits(stream, bitorder="little").tobytes() + _EMPTY


@functools.lru_cache
def _codes(width: int) -> np.ndarray:
    """The bits with which a block begins whose 2**width codes, of the first bytes and of its end, are equally long."""
    bits: list[int] = []

    def put(value: int, count: int) -> None:
        bits.extend(value >> place & 1 for place in range(count))

    def repeat_zero(count: int) -> None:
        bits.extend((1, 1))
        put(count - 11, 7)

    put(0b100, 3)  # not the last block; with codes of its own
    put(0, 10)  # 257 codes of bytes and the end, one of distances
    put(len(_LENGTHS) - 4, 4)
    for length in _LENGTHS:  # the length `width` has code 0; 0 has 10, and many zeros, which are 18, have 11
        put({width: 1, 0: 2, 18: 2}.get(length, 0), 3)
    used = 2**width - 1
    bits.extend([0] * used)
    repeat_zero(138)
    repeat_zero(256 - used - 138)
    bits.extend((0, 1, 0))  # the end, and that there are no distances
    return np.array(bits, np.uint8)


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
