"""Spaces as JSON: they round-trip, and invalid JSON raises."""

from __future__ import annotations

import json
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from rein.spaces.space_json import describe_build, space_as_json, space_from_json

SPACES = [
    spaces.Discrete(3, start=2),
    spaces.MultiDiscrete([2, 3]),
    spaces.MultiDiscrete([[2, 3], [4, 5]], start=[[1, 1], [0, 0]]),
    spaces.MultiBinary(4),
    spaces.MultiBinary([2, 3]),
    spaces.Box(0, 255, (84, 84, 3), np.uint8),
    spaces.Box(np.array([-1.0, -np.inf], np.float32), np.array([1.1, np.inf], np.float32)),
    spaces.Box(-3.3, 1.1, (), np.float64),
    spaces.Box(0.0, 1.0, (0,)),
    spaces.Dict(OrderedDict(b=spaces.Discrete(2), a=spaces.Tuple((spaces.Box(-1.0, 1.0, (2,)), spaces.Discrete(2))))),
]


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_every_space_round_trips(space: spaces.Space[Any]) -> None:
    again = space_from_json(json.loads(json.dumps(space_as_json(space))))
    assert again == space and type(again) is type(space) and again.dtype == space.dtype


def test_image_space_is_short_json() -> None:
    assert len(json.dumps(space_as_json(spaces.Box(0, 255, (210, 160, 3), np.uint8)))) < 100


def test_unsupported_spaces_give_none() -> None:
    class Mine(spaces.Discrete): ...

    assert space_as_json(Mine(3)) is None
    assert space_as_json(spaces.Text(3)) is None
    assert space_as_json(spaces.Dict(a=spaces.Discrete(2), b=spaces.Text(3))) is None
    assert describe_build(object()) is None


NESTED: dict[str, Any] = {"space": "Discrete", "n": 2, "start": 0, "dtype": "int64"}
for _ in range(30):
    NESTED = {"space": "Tuple", "spaces": [[0, NESTED]]}


IMAGE = {"space": "Box", "low": 0, "high": 1, "dtype": "float32"}
COUNT = {"space": "Discrete", "start": 0, "dtype": "int64"}


@pytest.mark.parametrize(
    "data",
    [
        None,
        3,
        {},
        {"space": "os.system"},
        {"space": "Text", "n": 3},
        {"space": "Box", "shape": [10**5, 10**5], "low": 0, "high": 1, "dtype": "float32"},
        {"space": "Box", "shape": [-3], "low": 0, "high": 1, "dtype": "float32"},
        {"space": "Box", "shape": [3], "low": 0, "high": 1, "dtype": "O"},
        {"space": "Box", "shape": [2], "low": [1, 2, 3], "high": 1, "dtype": "float32"},
        {"space": "Discrete", "n": -1, "start": 0, "dtype": "int64"},
        {"space": "Discrete", "n": float("inf"), "start": 0, "dtype": "int64"},
        {"space": "Discrete", "n": 3, "start": 0, "dtype": "nothing"},
        {"space": "MultiBinary", "n": 10**12},
        {"space": "Dict", "spaces": [[[1], {"space": "Discrete", "n": 1, "start": 0, "dtype": "int64"}]]},
        NESTED,
        {"space": "Tuple", "spaces": [[i, {**IMAGE, "shape": [1 << 20]}] for i in range(100)]},
        {"space": "Tuple", "spaces": [[i, {**COUNT, "n": 2}] for i in range(20_000)]},
    ],
    ids=lambda data: f"{data!s:.40}",
)
def test_invalid_json_raises(data: Any) -> None:
    with pytest.raises(ValueError):
        space_from_json(data)


def nested(levels: int) -> spaces.Space[Any]:
    space: spaces.Space[Any] = spaces.Discrete(2)
    for _ in range(levels):
        space = spaces.Dict(a=space)
    return space


LARGE = (1 << 12, 1 << 13)


@pytest.mark.parametrize("space", [nested(9), spaces.Box(0, 1, LARGE, np.int8), spaces.MultiBinary(LARGE)], ids=str)
def test_space_that_the_reader_refuses_gives_none(space: spaces.Space[Any]) -> None:
    assert space_as_json(space) is None
    assert space_from_json(space_as_json(nested(8))) == nested(8)
