"""Compressed chunks have the encoding of HDF5's filters shuffle and gzip."""

from __future__ import annotations

import io
import math
import zlib
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from rein.store.format import nexus

RANDOM = np.random.default_rng(0)
CHUNKS = {
    "actions": RANDOM.integers(0, 2, (100, 8)),
    "many actions": RANDOM.integers(0, 2, 40_000),
    "many of three": RANDOM.integers(0, 3, 40_000).astype(np.int32),
    "many of four": RANDOM.integers(0, 4, 40_000),
    "many of fifteen": RANDOM.integers(0, 15, (10_000, 4)).astype(np.int8),
    "many of sixteen": RANDOM.integers(0, 16, 40_000),
    "many coins": RANDOM.random((600, 64)) < 0.5,
    "many repeated ones": np.tile(RANDOM.integers(0, 6, 64), 600),
    "larger actions": RANDOM.integers(0, 70_000, (40, 3)).astype(np.int32),
    "seeds": RANDOM.integers(0, 2**31, 300),
    "with -1": RANDOM.integers(-1, 5, 300),
    "flags": RANDOM.random((300, 2)) < 0.1,
    "all true": np.ones(5000, bool),
    "all false": np.zeros(5000, bool),
    "all -1": np.full(700, -1, np.int8),
    "all zero": np.zeros((70, 2, 5), np.int64),
    "all equal": np.full(700, 513, np.uint16),
    "the largest": np.full(700, 2**64 - 1, np.uint64),
    "images": RANDOM.integers(0, 256, (3, 12, 12, 3)).astype(np.uint8),
    "incompressible": RANDOM.integers(0, 256, 4000).astype(np.uint8),
    "complex": RANDOM.random(50) + 1j,
    "big-endian": np.arange(300, dtype=">i4"),
}


def stored(array: np.ndarray) -> tuple[int, bytes]:
    """Return the filter mask and the bytes of a dataset with one chunk."""
    with h5py.File(io.BytesIO(), "w") as file:
        dataset: Any = nexus.add_dataset(file, "array", array, chunks=array.shape)
        return dataset.id.read_direct_chunk((0,) * array.ndim)


def shuffled(chunk: np.ndarray) -> bytes:
    """Return the first bytes of all values, then the second ones, and so on."""
    return b"".join(chunk.tobytes()[place :: chunk.itemsize] for place in range(chunk.itemsize))


@pytest.mark.parametrize("name", CHUNKS)
def test_chunk_decompresses_to_its_shuffled_bytes(name: str) -> None:
    skipped, data = stored(CHUNKS[name])
    assert skipped == 0  # readers expect both filters, also if compression does not shrink the chunk
    assert zlib.decompress(data) == shuffled(CHUNKS[name])


KINDS = arrays.integer_dtypes(endianness="<") | arrays.unsigned_integer_dtypes(endianness="<") | arrays.boolean_dtypes()


@given(arrays.arrays(KINDS, st.integers(1, 70)))
def test_chunk_of_any_integers_decompresses_to_its_shuffled_bytes(chunk: np.ndarray) -> None:
    assert zlib.decompress(stored(chunk)[1]) == shuffled(chunk)


@pytest.mark.parametrize("name", CHUNKS)
def test_hdf5_reads_partial_chunks_at_the_edge(name: str) -> None:
    array = CHUNKS[name]
    chunks = tuple(math.ceil(size * 0.4) for size in array.shape)
    memory = io.BytesIO()
    with h5py.File(memory, "w") as file:
        nexus.add_dataset(file, "array", array, chunks=chunks)
    with h5py.File(memory, "r") as file:
        dataset = file["array"]
        assert isinstance(dataset, h5py.Dataset) and (dataset.chunks, dataset.compression) == (chunks, "gzip")
        np.testing.assert_array_equal(dataset[()], array, strict=True)
