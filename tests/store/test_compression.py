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
from hypothesis.extra import numpy as arrays

from rein.store.format import nexus

KINDS = arrays.integer_dtypes() | arrays.unsigned_integer_dtypes() | arrays.boolean_dtypes()


@given(arrays.arrays(KINDS, arrays.array_shapes(max_dims=3, max_side=40)))
def test_chunk_decompresses_to_its_shuffled_bytes(chunk: np.ndarray) -> None:
    with h5py.File(io.BytesIO(), "w") as file:
        dataset: Any = nexus.add_dataset(file, "array", chunk, chunks=chunk.shape)
        skipped, data = dataset.id.read_direct_chunk((0,) * chunk.ndim)
    assert skipped == 0  # readers expect both filters, also if compression does not shrink the chunk
    shuffled = (chunk.tobytes()[place :: chunk.itemsize] for place in range(chunk.itemsize))
    assert zlib.decompress(data) == b"".join(shuffled)


@pytest.mark.parametrize("dtype", ["?", "u1", "<i8", ">i4", "c16"])
@pytest.mark.parametrize("shape", [(40_000,), (3, 12, 12, 3)])
def test_hdf5_reads_partial_chunks_at_the_edge(dtype: str, shape: tuple[int, ...]) -> None:
    array = np.random.default_rng(0).integers(0, 256, shape).astype(dtype)
    chunks = tuple(math.ceil(size * 0.4) for size in array.shape)
    memory = io.BytesIO()
    with h5py.File(memory, "w") as file:
        nexus.add_dataset(file, "array", array, chunks=chunks)
    with h5py.File(memory, "r") as file:
        dataset = file["array"]
        assert isinstance(dataset, h5py.Dataset) and (dataset.chunks, dataset.compression) == (chunks, "gzip")
        np.testing.assert_array_equal(dataset[()], array, strict=True)
