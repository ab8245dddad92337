"""A policy that acts at random: in every space, under its seed, and in place of any other policy."""

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
    """What the environment would be given."""
    if isinstance(space, spaces.Dict):
        return {key: value(part, action[key], row) for key, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(value(part, action[str(index)], row) for index, part in enumerate(space.spaces))
    return action[row].numpy()


@pytest.mark.parametrize("space", SPACES.values(), ids=SPACES.keys())
def test_actions_lie_in_the_space_and_are_its_own_under_a_seed(space: spaces.Space[Any]) -> None:
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


def test_every_value_is_as_likely_as_any() -> None:
    observation = torch.zeros(20_000, 1)
    for name, low, high in (("Discrete", -1, 1), ("Box of integers", -3, 5), ("MultiBinary", 0, 1)):
        action = RandomPolicy(SPACES[name], seed=3).select_action(observation)[0].long()
        share = (action.flatten() - low).bincount() / action.numel()
        expected = torch.full((high - low + 1,), 1.0 / (high - low + 1))
        torch.testing.assert_close(share, expected, atol=0.015, rtol=0.0)
    both = RandomPolicy(SPACES["MultiDiscrete"], seed=3).select_action(observation)[0]
    assert [column.unique().tolist() for column in both.unbind(1)] == [[0, 1], [7, 8, 9, 10, 11]]


def test_a_box_of_one_value_gives_it() -> None:
    policy = RandomPolicy(spaces.Box(0.5, 0.5, (2,)), seed=0)
    assert torch.equal(policy.select_action(torch.zeros(3, 1))[0], torch.full((3, 2), 0.5))


def test_its_state_goes_on_where_it_was() -> None:
    observation, policy, loaded = torch.zeros(N, 1), *(RandomPolicy(SPACES["Box"], seed) for seed in (0, 1))
    policy.select_action(observation)
    loaded.load_state_dict(copy_state(policy.state_dict()))
    assert torch.equal(loaded.select_action(observation)[0], policy.select_action(observation)[0])


@pytest.mark.parametrize(
    ("space", "error", "text"),
    [
        (spaces.Box(-np.inf, np.inf, (1,)), ValueError, "a Box with finite bounds"),
        (spaces.Box(-3e38, 3e38, (1,)), ValueError, "high - low finite in float32"),
        (spaces.Box(-1e300, 1e300, (1,), np.float64), ValueError, "high - low finite in float32"),
        (spaces.Dict({"word": spaces.Text(5)}), TypeError, "not a tensor"),
    ],
)
def test_a_space_that_cannot_be_drawn_from_is_refused_at_once(space: Any, error: Any, text: str) -> None:
    with pytest.raises(error, match=text):
        RandomPolicy(space, 0)


def test_it_is_evaluated_and_recorded_as_any_policy() -> None:
    found, stores = [], [rein.MemoryStore(), rein.MemoryStore()]
    for store in stores:
        environment = Pendulum(4, seed=0)
        policy = RandomPolicy(environment.single_action_space, seed=0)
        found.append(rein.evaluate(policy, environment, 6, recorder=Recorder(store, 4)))
    assert torch.equal(found[0].episode_return, found[1].episode_return)
    assert found[0].mean_return < -600.0
    assert [len(store.trajectories) for store in stores] == [2, 2]


def test_a_plain_function_is_told_what_a_policy_has() -> None:
    with pytest.raises(TypeError, match=r"function is no Policy; give an object with select_action.*RandomPolicy"):
        rein.evaluate(lambda observation: observation, Gridworld(2, seed=0), 1)  # type: ignore  # the mistake
