"""Tests of the actions that the Gymnasium adapter keeps for open episodes, and of their limit."""

from __future__ import annotations

import logging
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from rein.envs.gymnasium import GymnasiumEnvironment
from rein.ops.trees import leaves
from rein.testing.stateful import first_difference


class Endless(gymnasium.Env[Any, Any]):
    """Environment that observes the sum of all actions. An episode ends with action 9."""

    observation_space, action_space = spaces.Box(-np.inf, np.inf, (1,)), spaces.Discrete(10)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.total = np.zeros(1, np.float32) + self.np_random.integers(100)
        return self.total.copy(), {}

    def step(self, action: Any) -> Any:
        self.total += action
        return self.total.copy(), 1.0, action == 9, False, {}


def played(environment: GymnasiumEnvironment, actions: list[list[int]]) -> None:
    environment.reset()
    for action in actions:
        environment.apply_action(torch.tensor(action))


def endless(limit: int = 100) -> GymnasiumEnvironment:
    return GymnasiumEnvironment(Endless, 2, seed=0, max_replay_steps=limit)


def kept(environment: GymnasiumEnvironment) -> int:
    """Return the number of elements of a state."""
    return sum(x.numel() for _, x in leaves(environment.state_dict()) if isinstance(x, torch.Tensor))


def test_memory_of_an_endless_episode_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    environment = endless(limit=100)
    played(environment, [[1, 2]])
    few = kept(environment)
    for _ in range(1_000):
        environment.apply_action(torch.tensor([1, 2]))
        assert kept(environment) <= few + 2 * 100
    assert environment._transport.history._actions.shape == (2, 100)
    warnings = [record for record in caplog.records if "max_replay_steps=100" in record.getMessage()]
    assert len(warnings) == 1


@pytest.mark.parametrize("steps", [1, 63, 64, 65, 99, 100])
def test_episode_up_to_the_limit_is_resumed_exactly(steps: int) -> None:
    environment, loaded = endless(), endless()
    played(environment, [[k % 9, (k + 1) % 9] for k in range(steps)])
    loaded.load_state_dict(environment.state_dict())
    again = endless()  # a loaded state can be saved again
    again.load_state_dict(loaded.state_dict())
    expected = environment.apply_action(torch.tensor([1, 1]))
    for one in (loaded, again):
        assert first_difference(one.apply_action(torch.tensor([1, 1])), expected) is None


def test_episode_beyond_the_limit_restarts_on_resume(caplog: pytest.LogCaptureFixture) -> None:
    environment, loaded = endless(limit=10), endless(limit=10)
    played(environment, [[1, 2]] * 11)
    with caplog.at_level(logging.WARNING):
        loaded.load_state_dict(environment.state_dict())
    assert "max_replay_steps" in caplog.text
    assert loaded.awaits_reset
    loaded.reset()
    loaded.apply_action(torch.tensor([1, 2]))


def test_episode_after_one_beyond_the_limit_is_resumed_exactly() -> None:
    environment, loaded = endless(limit=10), endless(limit=10)
    played(environment, [[1, 2]] * 20 + [[9, 9]] + [[3, 4]] * 5)
    loaded.load_state_dict(environment.state_dict())
    action = torch.tensor([1, 2])
    assert first_difference(loaded.apply_action(action), environment.apply_action(action)) is None


@pytest.mark.parametrize("limit", [0, None, float("inf")])
def test_invalid_max_replay_steps_raises(limit: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=f"max_replay_steps={limit}: give"):
        endless(limit=limit)


def test_actions_that_are_sent_in_another_order_are_repeated() -> None:
    environment, loaded = endless(limit=100), endless(limit=100)
    played(environment, [[1, 2]] * 99)
    environment.send(torch.tensor([3, 7]), [1, 0])
    rows, _ = environment.receive()
    assert rows == [1, 0]
    loaded.load_state_dict(environment.state_dict())
    both = torch.tensor([4, 5])
    assert first_difference(loaded.apply_action(both), environment.apply_action(both)) is None


def test_partial_step_beyond_the_limit_keeps_the_actions_of_the_others() -> None:
    environment = GymnasiumEnvironment(Endless, 3, seed=0, max_replay_steps=100)
    played(environment, [[1, 2, 9]] * 100)
    environment.apply_action_where(torch.tensor([3, 4, 5]), torch.tensor([False, True, True]))
    state = environment.state_dict()
    assert state["steps"].tolist() == [100, -1, 1]
    assert state["actions"][2].tolist() == [5]
