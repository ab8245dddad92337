"""DDPG: contract tests, probe environments, and differences from TD3."""

from __future__ import annotations

import pytest
import torch
from gymnasium import spaces

import rein
from rein.agents.base.action_noise import OrnsteinUhlenbeck
from rein.agents.ddpg import DDPG
from rein.envs.probes import Reach
from rein.ops.random import generator

BOX = spaces.Box(-1.0, 1.0, (2,))
SMALL = {"hidden": (16,), "batch_size": 16, "capacity": 300, "learning_starts": 8}


def fitted(environment, **options) -> DDPG:
    return DDPG(environment.single_observation_space, environment.single_action_space, **{**SMALL, **options})


def test_single_critic_and_target_without_noise():
    environment = Reach(4, dimensions=2, seed=0)
    agent = fitted(environment, seed=0, gamma=0.8)
    rein.train(agent, environment, epochs=1, iterations=10)
    networks, sample = agent.networks, agent.replay.sample(20, generator(0, "test"), gamma=0.8)
    position = agent.generator.get_state()
    found = agent.target(sample, agent._next_values(sample.next_observation))
    assert torch.equal(position, agent.generator.get_state())
    (value,) = networks.target_critics(sample.next_observation, networks.target_actor(sample.next_observation).tanh())
    torch.testing.assert_close(found, sample.reward + 0.8 * value, rtol=1e-5, atol=1e-5)


def test_default_noise_is_ornstein_uhlenbeck():
    assert isinstance(DDPG(BOX, BOX, seed=0, **SMALL).noise, OrnsteinUhlenbeck)


@pytest.mark.parametrize("option", ["critics", "target_noise", "target_noise_clip"])
def test_td3_options_are_rejected(option):
    with pytest.raises(TypeError, match=f"DDPG: there is no option {option}"):
        DDPG(BOX, BOX, **{option: 2})


def test_actor_is_updated_from_the_first_update():
    agent = DDPG(BOX, BOX, seed=0, **{**SMALL, "learning_starts": 0})
    before = agent.networks.actor.head.weight.clone()
    no, x = torch.zeros(4, dtype=torch.bool), torch.rand(4, 2, generator=generator(0, "rows"))
    agent.record_observation(rein.Transition(x, x, x[:, 0], no, no, x, ~no, {}))
    assert "actor_loss" in agent.optimize_model()
    assert not torch.equal(before, agent.networks.actor.head.weight)
