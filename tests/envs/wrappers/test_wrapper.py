"""Tests of the base class Wrapper."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

import rein
from rein.agents.q_learning import QLearning
from rein.envs.gridworld import Gridworld
from rein.envs.gymnasium import GymnasiumEnvironment
from rein.envs.wrappers.observations import FrameStack
from rein.envs.wrappers.rewards import ClipReward, ScaleReward
from rein.envs.wrappers.wrapper import unwrapped


def test_unwrapped_returns_the_innermost_environment() -> None:
    gridworld = Gridworld(2)
    wrapped = FrameStack(ScaleReward(gridworld, 2.0))
    assert wrapped.unwrapped is gridworld
    assert unwrapped(wrapped) is unwrapped(gridworld) is gridworld
    assert wrapped.inner.inner is gridworld
    assert np.array_equal(wrapped.render(1), gridworld.render(1))


def test_config_describes_every_layer() -> None:
    gridworld = Gridworld(2, seed=5)
    config = json.loads(json.dumps(FrameStack(ScaleReward(gridworld, 2.0), 3).config))
    assert config["length"] == 3
    assert config["inner"]["type"] == "rein.envs.wrappers.rewards.ScaleReward"
    assert config["inner"]["config"]["scale"] == 2.0
    assert config["inner"]["config"]["inner"] == {"type": "rein.envs.gridworld.Gridworld", "config": gridworld.config}


def test_loop_trains_in_a_wrapped_environment() -> None:
    environment = ClipReward(Gridworld(4), -3.0, 0.0)
    agent = QLearning(environment.single_observation_space, environment.single_action_space)
    final = rein.train(agent, environment, epochs=2, iterations=40, seed=3)
    assert final.status == "completed"
    assert environment.seed == environment.inner.seed == 3
    assert torch.equal(environment.episode_seeds, environment.inner.episode_seeds)


def test_missing_methods_raise_the_error_of_the_inner_environment(whole_clockwork: Any) -> None:
    environment = ScaleReward(whole_clockwork(2), 1.0)
    environment.reset()
    with pytest.raises(AttributeError, match="'Clockwork' object has no attribute 'reset_where'"):
        environment.reset_where(torch.tensor([True, False]))
    assert not hasattr(environment, "apply_action_where")
    part = ScaleReward(GymnasiumEnvironment("Taxi-v4"), 1.0)
    assert [hasattr(part, name) for name in ("reset_where", "apply_action_where")] == [True, True]


def test_awaits_reset_forwards_to_the_inner_environment() -> None:
    environment = ScaleReward(FrameStack(GymnasiumEnvironment("Blackjack-v1", 2, seed=0, replayable=False)), 2.0)
    assert environment.awaits_reset
    environment.reset()
    assert not environment.awaits_reset
    environment.load_state_dict(environment.state_dict())  # its episodes cannot be restored
    assert environment.awaits_reset
    assert not ScaleReward(Gridworld(2), 1.0).awaits_reset  # has no such attribute
