"""Tests of FlattenObservation against `gymnasium.spaces.flatten`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from rein.envs.wrappers.observations import FlattenObservation
from rein.spaces.conversion import Codec

SPACES: dict[str, spaces.Space[Any]] = {
    "vector": spaces.Box(-1.0, 1.0, (3,)),
    "scalar": spaces.Box(-1.0, 1.0, ()),
    "float64": spaces.Box(-np.inf, np.inf, (2, 2), np.float64),
    "image": spaces.Box(0, 255, (2, 3, 3), np.uint8),
    "discrete": spaces.Discrete(5),
    "discrete from -2": spaces.Discrete(5, start=-2),
    "multi discrete": spaces.MultiDiscrete([2, 5, 3]),
    "multi discrete from 4": spaces.MultiDiscrete([[2, 5], [3, 1]], start=[[4, 0], [-1, 7]]),
    "multi binary": spaces.MultiBinary([2, 3]),
    "tuple": spaces.Tuple([spaces.Discrete(32), spaces.Discrete(11), spaces.Discrete(2)]),
    "dict": spaces.Dict(
        {
            "z": spaces.Box(0.0, 1.0, (2,)),
            "a": spaces.Dict({"place": spaces.MultiDiscrete([3, 4]), "image": spaces.Box(0, 255, (2, 2), np.uint8)}),
            "m": spaces.Tuple([spaces.MultiBinary(3), spaces.Discrete(2)]),
        }
    ),
}


@pytest.mark.parametrize("space", SPACES.values(), ids=SPACES)
def test_rows_equal_gymnasiums_flatten(space: spaces.Space[Any]) -> None:
    space.seed(0)
    samples = [space.sample() for _ in range(50)]
    observation = Codec("observation", space).stack(samples)
    inner = SimpleNamespace(
        single_observation_space=space, device=torch.device("cpu"), reset=lambda seed=None: observation
    )
    environment = FlattenObservation(inner)  # type: ignore[arg-type]  # a stub
    flat = environment.reset()
    expected = np.stack([spaces.flatten(space, sample) for sample in samples]).astype(np.float32)
    assert flat.dtype is torch.float32
    assert torch.equal(flat, torch.from_numpy(expected))
    theirs: Any = spaces.flatten_space(space)
    assert environment.single_observation_space.shape == theirs.shape
    assert np.array_equal(environment.single_observation_space.low, theirs.low.astype(np.float32))
    assert np.array_equal(environment.single_observation_space.high, theirs.high.astype(np.float32))
