"""Conversion of values of a space to tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector.utils import batch_space

from rein.errors import EnvironmentContractError
from rein.spaces.conversion import BatchCodec, Codec, column

INT8, UINT8 = spaces.Box(-100, 100, (1,), np.int8), spaces.Box(0, 255, (1,), np.uint8)
INT16, INT32 = spaces.Box(-5, 5, (1,), np.int16), spaces.Box(-5, 5, (1,), np.int32)
FLOAT16, FLOAT64 = spaces.Box(-5, 5, (1,), np.float16), spaces.Box(-5, 5, (1,), np.float64)


def codec(kind: Any, space: spaces.Space[Any]) -> Any:
    """Return a function that converts two values to a tensor."""
    if kind is Codec:
        return Codec("observation", space).stack
    return lambda values: BatchCodec("observation", space, batch_space(space, 2), 2).tensors(np.array(values))


BEYOND = [
    (INT8, np.int64, 300),
    (INT8, np.int64, -129),
    (UINT8, np.uint16, 300),
    (INT16, np.uint16, 40000),  # same width, but wraps
    (INT32, np.int64, 2**40),
    (spaces.MultiBinary(1), np.int64, 256),
    (spaces.MultiDiscrete([3]), np.uint64, 2**63),
]


@pytest.mark.parametrize("kind", [Codec, BatchCodec])
@pytest.mark.parametrize(("space", "dtype", "number"), BEYOND)
def test_out_of_range_number_raises_with_row_and_value(
    kind: Any, space: spaces.Space[Any], dtype: Any, number: Any
) -> None:
    values = [np.array([0], dtype), np.array([number], dtype)]
    text = f"observation, row 1: expected .*, got {values[1][0]}, which is out of range"
    with pytest.raises(EnvironmentContractError, match=text.replace("+", r"\+")):
        codec(kind, space)(values)


@pytest.mark.parametrize("kind", [Codec, BatchCodec])
@pytest.mark.parametrize(
    ("space", "given", "converted"),
    [
        (INT8, np.array([-128], np.int64), -128),
        (UINT8, np.array([255], np.uint64), 255),
        (FLOAT64, np.array([np.inf]), np.inf),
        (FLOAT64, np.array([0.1]), float(np.float32(0.1))),
        (FLOAT64, np.array([1e-300]), 0.0),
        (FLOAT16, np.array([2049]), 2048.0),
    ],
)
def test_number_of_a_wider_type_in_range_is_accepted(
    kind: Any, space: spaces.Space[Any], given: Any, converted: float
) -> None:
    assert codec(kind, space)([given, given]).tolist() == [[converted], [converted]]


def test_error_names_the_row_for_mixed_types() -> None:
    values = [np.int8(1), np.uint64(300)]  # numpy would promote both to float64
    assert column("count", values, np.dtype(np.int16)).tolist() == [1, 300]
    with pytest.raises(EnvironmentContractError, match="count, row 1: expected int8, got 300, which is out of range"):
        column("count", values, np.dtype(np.int8))
