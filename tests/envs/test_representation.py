"""The repr of an environment shows type, number of environments and spaces."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

import rein
from rein.envs.probes import Bandit, Reach
from rein.envs.wrappers import ClipReward, FrameStack, TimeLimit

GRID = (
    "Gridworld(num_envs=3, observation_space=Box(0.0, 1.0, (6,), float32), action_space=Discrete(4))",
    lambda: rein.envs.Gridworld(3, observation="vector"),
)
REACH = (
    "Reach(num_envs=2, observation_space=Box(-1.0, 1.0, (1,), float32), action_space=Box(-1.0, 1.0, (1,), float32))",
    lambda: Reach(2),
)
BANDIT = (
    "Bandit(num_envs=2, observation_space=Box(0.0, 1.0, (2,), float32), action_space=Discrete(2))",
    lambda: Bandit(2),
)
ADAPTER = (
    "GymnasiumEnvironment('MountainCar-v0', num_envs=2, "
    "observation_space=Box([-1.2 -0.07], [0.6 0.07], (2,), float32), action_space=Discrete(3))",
    lambda: rein.make("MountainCar-v0", 2),
)
VECTOR = (
    "GymnasiumVectorEnvironment('FrozenLake-v1', num_envs=2, observation_space=Discrete(16), action_space=Discrete(4))",
    lambda: rein.envs.GymnasiumVectorEnvironment("FrozenLake-v1", 2, vectorization_mode="sync"),
)


@pytest.mark.parametrize(("text", "make"), [GRID, REACH, BANDIT, ADAPTER, VECTOR])
def test_repr_shows_type_number_and_spaces(text: str, make: Any) -> None:
    assert repr(make()) == text


def test_repr_of_a_wrapper_shows_the_wrapped_environment() -> None:
    inner = Reach(2)
    assert repr(TimeLimit(ClipReward(inner), 5)) == f"TimeLimit(ClipReward({inner!r}))"


def test_repr_of_a_wrapper_shows_the_spaces_that_it_changes() -> None:
    inner = Reach(2)
    assert repr(FrameStack(inner, 3)) == f"FrameStack({inner!r}, observation_space=Box(-1.0, 1.0, (3, 1), float32))"


def test_repr_is_one_line() -> None:
    class Wide(gymnasium.Env[Any, Any]):
        observation_space = spaces.Box(np.arange(60, dtype=np.float32), np.float32(60.0) * np.ones(60, np.float32))
        action_space = spaces.Discrete(2)

    assert "\n" not in repr(rein.make(Wide))
