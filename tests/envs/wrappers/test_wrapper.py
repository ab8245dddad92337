"""What a wrapper does not change is the inner environment's."""

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
from rein.envs.wrappers.base import unwrapped
from rein.envs.wrappers.observations import FrameStack
from rein.envs.wrappers.rewards import ClipReward, ScaleReward


def test_the_environment_inside_is_at_hand() -> None:
    gridworld = Gridworld(2)
    wrapped = FrameStack(ScaleReward(gridworld, 2.0))
    assert wrapped.unwrapped is gridworld
    assert unwrapped(wrapped) is unwrapped(gridworld) is gridworld
    assert wrapped.inner.inner is gridworld
    assert np.array_equal(wrapped.render(1), gridworld.render(1))


def test_the_configuration_tells_every_layer() -> None:
    gridworld = Gridworld(2, seed=5)
    config = json.loads(json.dumps(FrameStack(ScaleReward(gridworld, 2.0), 3).config))
    assert config["length"] == 3
    assert config["inner"]["type"] == "rein.envs.wrappers.rewards.ScaleReward"
    assert config["inner"]["config"]["scale"] == 2.0
    assert config["inner"]["config"]["inner"] == {"type": "rein.envs.gridworld.Gridworld", "config": gridworld.config}


def test_a_loop_seeds_trains_in_and_closes_a_wrapped_environment() -> None:
    environment = ClipReward(Gridworld(4), -3.0, 0.0)
    agent = QLearning(environment.single_observation_space, environment.single_action_space)
    final = rein.train(agent, environment, epochs=2, iterations=40, seed=3)
    assert final.status == "completed"
    assert environment.seed == environment.inner.seed == 3
    assert torch.equal(environment.episode_seeds, environment.inner.episode_seeds)


def test_what_the_inner_environment_does_not_offer_is_missed_by_its_own_name(whole_clockwork: Any) -> None:
    environment = ScaleReward(whole_clockwork(2), 1.0)
    environment.reset()
    with pytest.raises(AttributeError, match="'Clockwork' object has no attribute 'reset_where'"):
        environment.reset_where(torch.tensor([True, False]))
    assert not hasattr(environment, "apply_action_where")
    part = ScaleReward(GymnasiumEnvironment("Taxi-v4"), 1.0)
    assert [hasattr(part, name) for name in ("reset_where", "apply_action_where")] == [True, True]


def test_a_wrapper_awaits_a_reset_where_the_environment_inside_does() -> None:
    environment = ScaleReward(FrameStack(GymnasiumEnvironment("Blackjack-v1", 2, seed=0, replayable=False)), 2.0)
    assert environment.awaits_reset
    environment.reset()
    assert not environment.awaits_reset
    environment.load_state_dict(environment.state_dict())  # whose episodes cannot be brought back
    assert environment.awaits_reset
    assert not ScaleReward(Gridworld(2), 1.0).awaits_reset  # which does not say
