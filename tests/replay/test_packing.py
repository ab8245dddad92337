"""Tests of packing rows into bytes, for all dtypes and shapes."""

from __future__ import annotations

import itertools

import pytest
import torch

from rein.replay.storage import Packing, example, fits, stack_rows

TYPES = [torch.uint8, torch.float64, torch.bool, torch.int16, torch.float32, torch.int64, torch.float16, torch.int8]
TYPES += [torch.bfloat16, torch.complex64, torch.float8_e4m3fn]
SHAPES = [(), (3,), (2, 5, 3), (1,), (7,), (2, 2), (1, 1, 1), (13,), (3, 2), (2,), (4,)]


def row_of(num_envs=4, seed=0):
    drawn = torch.Generator().manual_seed(seed)
    named = {}
    for number, (dtype, shape) in enumerate(zip(TYPES, SHAPES, strict=True)):
        named[f"field {number}"] = torch.randint(0, 2, (num_envs, *shape), generator=drawn).to(dtype)
    return {"flat": named.pop("field 0"), "nested.deep": {"a.b": named.pop("field 1"), "c": {"d": named}}}


def flat(tree, path=()):
    return {
        k: v
        for n, c in tree.items()
        for k, v in (flat(c, (*path, n)) if isinstance(c, dict) else {(*path, n): c}).items()
    }


@pytest.mark.parametrize("more", [{}, {"large": torch.arange(4 * 600).view(4, 600)}], ids=["small", "large"])
def test_fields_written_as_columns_are_read_as_rows(more):
    """Small rows are read by numpy, large ones by torch."""
    row = {**row_of(), **more}
    packing = Packing(row)
    storage = torch.zeros(4, packing.row_bytes, dtype=torch.uint8)
    columns = packing.columns(storage)
    for path, value in flat(row).items():
        assert (columns[path].shape, columns[path].dtype) == (value.shape, value.dtype)
        columns[path].copy_(value)
    index = torch.tensor([3, 0, 0, 2])
    found = packing.fields(["nested.deep", "flat"]).of(storage, index)
    assert list(found) == ["nested.deep", "flat"]
    for path, value in flat(row_of()).items():
        assert torch.equal(flat(found)[path], value[index])
        assert flat(found)[path].dtype is value.dtype


@pytest.mark.parametrize("size", [1, 600], ids=["small", "large"])
def test_read_copies_rows_and_rejects_bad_indices(size):
    packing = Packing({"x": torch.zeros(3, size), "y": torch.zeros(3, 0)})
    storage = torch.zeros(3, packing.row_bytes, dtype=torch.uint8)
    found = packing.fields(["x", "y"]).of(storage, torch.tensor([2]))
    assert found["y"].shape == (1, 0)
    found["x"].fill_(1.0)
    assert not storage.any()
    for index in (
        torch.tensor([3]),
        torch.tensor([[1, 2], [0, 1]]),
        torch.tensor([True, False, True]),
        torch.tensor([0.0]),
    ):
        with pytest.raises((IndexError, RuntimeError)):
            packing.fields(["x"]).of(storage, index)
    assert packing.fields(["x"]).of(storage, torch.tensor(2))["x"].shape == (1, size)


def test_large_batch_equals_small_batches():
    """Large batches are read by torch, small ones by numpy."""
    packing = Packing({"x": torch.zeros(3, 2)})
    storage = torch.arange(24, dtype=torch.uint8).view(3, 8)
    index = torch.arange(300_000) % 3
    large, small = (packing.fields(["x"]).of(storage, numbers)["x"] for numbers in (index, index[:3]))
    assert torch.equal(large, small.repeat(100_000, 1))


def test_default_device_does_not_affect_cpu_rows():
    row = {name: torch.ones(3, 1, dtype=dtype) for name, dtype in zip("abc", TYPES[-3:], strict=True)}
    row["d"] = torch.ones(3, dtype=torch.complex128)
    packing = Packing(row)
    storage = torch.zeros(3, packing.row_bytes, dtype=torch.uint8)
    index = torch.tensor([1])
    torch.set_default_device("meta")
    try:
        found = packing.fields(list(row)).of(storage, index)
    finally:
        torch.set_default_device(None)
    assert {name: (x.dtype, x.device.type) for name, x in found.items()} == {
        n: (x.dtype, "cpu") for n, x in row.items()
    }


def test_fields_do_not_overlap_and_are_aligned():
    packing = Packing(row_of())
    taken = sorted((place.offset, place.offset + place.size) for place in packing.places)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(taken))
    assert taken[0][0] == 0 and taken[-1][1] <= packing.row_bytes < taken[-1][1] + 64
    assert all(place.offset % place.dtype.itemsize == 0 for place in packing.places)


def test_config_rebuilds_packing():
    packing = Packing(row_of())
    again = Packing(example(packing.config))
    assert (again.config, again.places, again.row_bytes) == (packing.config, packing.places, packing.row_bytes)


@pytest.mark.parametrize("dtype", ["save", "Tensor", "nothing", "cuda"])
def test_config_with_unknown_dtype_raises(dtype):
    with pytest.raises(ValueError, match=f"unknown dtype '{dtype}'"):
        example([{"path": ["reward"], "dtype": dtype, "shape": []}])


def test_row_that_differs_raises_with_field_name():
    packing = Packing({"a": {"b": torch.zeros(2, 3)}, "c": torch.zeros(2)})
    like = packing.like(2)
    assert fits({"c": torch.ones(2), "a": {"b": torch.ones(2, 3)}}, like)
    bad = {
        "a.b": {"a": {"b": torch.zeros(2, 4)}, "c": torch.zeros(2)},
        "c": {"a": {"b": torch.zeros(2, 3)}, "c": torch.zeros(2, dtype=torch.int64)},
        "a.d": {"a": {"b": torch.zeros(2, 3), "d": torch.zeros(2)}, "c": torch.zeros(2)},
        "e": {"a": {"b": torch.zeros(2, 3)}, "c": torch.zeros(2), "e": torch.zeros(2)},
    }
    for name, row in bad.items():
        assert not fits(row, like)
        with pytest.raises(ValueError, match=rf"{name} is .*, but was .* in earlier rows"):
            packing.check(row)
    assert not fits({"a": {"b": torch.zeros(3, 3)}, "c": torch.zeros(3)}, like)


@pytest.mark.parametrize("value", [1.0, torch.tensor(1.0), None, [torch.zeros(2)]])
def test_field_other_than_a_tensor_of_rows_raises(value):
    with pytest.raises(ValueError, match=r"a\.b: a field of a row must be a tensor \(N, ...\)"):
        Packing({"a": {"b": value}})


def test_stack_rows_keeps_order():
    rows = [row_of(seed=seed) for seed in range(3)]
    for count in (1, 3):
        stacked = flat(stack_rows(rows[:count]))
        for path, value in stacked.items():
            assert torch.equal(value, torch.stack([flat(row)[path] for row in rows[:count]]))
