"""RandomPolicy: spaces, seeds, and use as a policy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

import rein
from rein.envs.gridworld import Gridworld
from rein.envs.pendulum import Pendulum
from rein.episodes import RandomPolicy, Recorder
from rein.protocols import Policy, Stateful
from rein.testing.stateful import copy_state, first_difference

N = 400
SPACES: dict[str, spaces.Space[Any]] = {
    "Discrete": spaces.Discrete(3, start=-1),
    "Box": spaces.Box(np.float32([-2.0, 0.0]), np.float32([2.0, 0.5])),
    "Box of integers": spaces.Box(-3, 5, (2, 2), np.int16),
    "Box of bytes": spaces.Box(0, 255, (2,), np.uint8),
    "MultiDiscrete": spaces.MultiDiscrete([2, 5], start=[0, 7]),
    "MultiBinary": spaces.MultiBinary(3),
}
SPACES["Dict"] = spaces.Dict({"go": SPACES["Box"], "say": spaces.Tuple([SPACES["Discrete"], SPACES["MultiBinary"]])})


def value(space: spaces.Space[Any], action: Any, row: int) -> Any:
    """Return the action of a row as the environment receives it."""
    if isinstance(space, spaces.Dict):
        return {key: value(part, action[key], row) for key, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(value(part, action[str(index)], row) for index, part in enumerate(space.spaces))
    return action[row].numpy()


@pytest.mark.parametrize("space", SPACES.values(), ids=SPACES.keys())
def test_actions_are_in_the_space_and_determined_by_the_seed(space: spaces.Space[Any]) -> None:
    observation = {"camera": torch.zeros(N, 2), "speed": torch.zeros(N)}
    policy, same, other = (RandomPolicy(space, seed) for seed in (0, 0, 1))
    assert isinstance(policy, Policy) and isinstance(policy, Stateful)
    state = torch.get_rng_state()
    action, extras = policy.select_action(observation)
    assert extras == {}
    assert all(space.contains(value(space, action, row)) for row in range(N))
    assert first_difference(action, same.select_action(observation)[0]) is None
    assert first_difference(action, other.select_action(observation)[0]) is not None
    policy.reset(torch.ones(N, dtype=torch.bool))
    assert first_difference(action, policy.select_action(observation)[0]) is not None
    assert torch.equal(state, torch.get_rng_state())


def test_all_values_are_equally_likely() -> None:
    observation = torch.zeros(20_000, 1)
    for name, low, high in (("Discrete", -1, 1), ("Box of integers", -3, 5), ("MultiBinary", 0, 1)):
        action = RandomPolicy(SPACES[name], seed=3).select_action(observation)[0].long()
        share = (action.flatten() - low).bincount() / action.numel()
        expected = torch.full((high - low + 1,), 1.0 / (high - low + 1))
        torch.testing.assert_close(share, expected, atol=0.015, rtol=0.0)
    both = RandomPolicy(SPACES["MultiDiscrete"], seed=3).select_action(observation)[0]
    assert [column.unique().tolist() for column in both.unbind(1)] == [[0, 1], [7, 8, 9, 10, 11]]


def test_box_with_equal_bounds_gives_its_only_value() -> None:
    policy = RandomPolicy(spaces.Box(0.5, 0.5, (2,)), seed=0)
    assert torch.equal(policy.select_action(torch.zeros(3, 1))[0], torch.full((3, 2), 0.5))


def test_loaded_state_continues_the_sequence() -> None:
    observation, policy, loaded = torch.zeros(N, 1), *(RandomPolicy(SPACES["Box"], seed) for seed in (0, 1))
    policy.select_action(observation)
    loaded.load_state_dict(copy_state(policy.state_dict()))
    assert torch.equal(loaded.select_action(observation)[0], policy.select_action(observation)[0])


@pytest.mark.parametrize(
    ("space", "error", "text"),
    [
        (spaces.Box(-np.inf, np.inf, (1,)), ValueError, "a Box with finite bounds"),
        (spaces.Box(-3e38, 3e38, (1,)), ValueError, "high - low that is finite in float32"),
        (spaces.Box(-1e300, 1e300, (1,), np.float64), ValueError, "high - low that is finite in float32"),
        (spaces.Dict({"word": spaces.Text(5)}), TypeError, "unsupported space"),
    ],
)
def test_unsupported_space_raises_immediately(space: Any, error: Any, text: str) -> None:
    with pytest.raises(error, match=text):
        RandomPolicy(space, 0)


def test_random_policy_is_evaluated_and_recorded() -> None:
    found, stores = [], [rein.MemoryStore(), rein.MemoryStore()]
    for store in stores:
        environment = Pendulum(4, seed=0)
        policy = RandomPolicy(environment.single_action_space, seed=0)
        found.append(rein.evaluate(policy, environment, 6, recorder=Recorder(store, 4)))
    assert torch.equal(found[0].episode_return, found[1].episode_return)
    assert found[0].mean_return < -600.0
    assert [len(store.trajectories) for store in stores] == [2, 2]


def test_error_for_a_function_describes_policies() -> None:
    with pytest.raises(TypeError, match=r"function is not a Policy; pass an object with select_action.*RandomPolicy"):
        rein.evaluate(lambda observation: observation, Gridworld(2, seed=0), 1)  # type: ignore  # wrong on purpose
