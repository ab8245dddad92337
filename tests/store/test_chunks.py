"""Compressed chunks are those of HDF5's own filters."""

from __future__ import annotations

import io
import math
import zlib

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from rein.store.format import objects
from rein.store.format.chunks import compress

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
    "pictures": RANDOM.integers(0, 256, (3, 12, 12, 3)).astype(np.uint8),
    "complex": RANDOM.random(50) + 1j,
    "of the other byte order": np.arange(300, dtype=">i4"),
}


def shuffled(chunk: np.ndarray) -> bytes:
    """All first bytes of the values, then all second ones, and so on."""
    return b"".join(chunk.tobytes()[place :: chunk.itemsize] for place in range(chunk.itemsize))


@pytest.mark.parametrize("name", CHUNKS)
def test_a_chunk_inflates_to_its_bytes_in_order_of_their_places(name: str) -> None:
    assert zlib.decompress(compress(CHUNKS[name])) == shuffled(CHUNKS[name])


KINDS = arrays.integer_dtypes(endianness="<") | arrays.unsigned_integer_dtypes(endianness="<") | arrays.boolean_dtypes()


@given(arrays.arrays(KINDS, st.integers(1, 70)))
def test_so_does_any_of_whole_numbers(chunk: np.ndarray) -> None:
    assert zlib.decompress(compress(chunk)) == shuffled(chunk)


@pytest.mark.parametrize("name", CHUNKS)
def test_hdf5_reads_what_chunks_do_not_divide(name: str) -> None:
    array = CHUNKS[name]
    chunks = tuple(math.ceil(size * 0.4) for size in array.shape)
    memory = io.BytesIO()
    with h5py.File(memory, "w") as file:
        objects.add_dataset(file, "array", array, chunks=chunks)
    with h5py.File(memory, "r") as file:
        dataset = file["array"]
        assert isinstance(dataset, h5py.Dataset) and (dataset.chunks, dataset.compression) == (chunks, "gzip")
        np.testing.assert_array_equal(dataset[()], array, strict=True)


@pytest.mark.parametrize("name", ["actions", "flags", "seeds"])
def test_a_chunk_is_no_larger_than_one_of_plain_zlib(name: str) -> None:
    assert len(compress(CHUNKS[name])) <= len(zlib.compress(shuffled(CHUNKS[name]), 1)) + 16


@given(st.integers(1, 15), st.integers(15_000, 40_000), st.sampled_from(["u1", "i2", "i8"]))
def test_many_small_numbers_inflate_to_theirs(choices: int, count: int, kind: str) -> None:
    chunk = np.random.default_rng(count).integers(0, choices, count).astype(kind)
    assert zlib.decompress(compress(chunk)) == shuffled(chunk)


@pytest.mark.parametrize("name", ["many actions", "many of three", "many of four", "many of fifteen", "many coins"])
def test_numbers_without_repetitions_take_little_more_than_by_plain_zlib(name: str) -> None:
    assert len(compress(CHUNKS[name])) <= 1.2 * len(zlib.compress(shuffled(CHUNKS[name]), 1))


COIN = RANDOM.integers(0, 2, 40_000)
ORDERLY = {
    "many repeated ones": CHUNKS["many repeated ones"],
    "random at first": np.where(np.arange(40_000) < 5000, COIN, 0),
    "random in the end": np.where(np.arange(40_000) > 35_000, COIN, 1),
    "random but in the middle": np.where(abs(np.arange(40_000) - 13_000) < 3000, 1, COIN),
    "less and less random": np.where(RANDOM.random(40_000) < np.linspace(1.0, 0.02, 40_000), COIN, 1),
}


@pytest.mark.parametrize("name", ORDERLY)
def test_numbers_with_repetitions_somewhere_are_searched_for_them(name: str) -> None:
    assert len(compress(ORDERLY[name])) <= len(zlib.compress(shuffled(ORDERLY[name]), 1)) + 16
