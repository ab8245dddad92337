"""TD3: contract tests, probe environments, targets and noise."""

from __future__ import annotations

import pytest
import torch
from gymnasium import spaces

from rein.agents.base.action_noise import GaussianNoise, OrnsteinUhlenbeck
from rein.agents.ddpg import DDPG
from rein.agents.td3 import TD3
from rein.ops.random import generator
from rein.schedules import linear
from rein.testing.stateful import copy_state
from rein.types import Transition

BOX = spaces.Box(-1.0, 1.0, (2,))
SMALL = {"hidden": (16,), "batch_size": 16, "capacity": 300, "learning_starts": 8}


def trained(agent, steps, num_envs=4):
    no = torch.zeros(num_envs, dtype=torch.bool)
    for step in range(steps):
        observation, after = torch.rand(2, num_envs, 2, generator=generator(0, "rows", step)) - 0.5
        action, extras = agent.select_action(observation)
        agent.record_observation(Transition(observation, action, observation[:, 0], no, no, after, ~no, extras))
        agent.optimize_model()
    return agent


def test_target_matches_definition():
    """r + gamma min Q' at the target action with clipped noise, or r if terminated."""
    agent = trained(TD3(BOX, BOX, gamma=0.8, target_noise=0.4, target_noise_clip=0.5, seed=0, **SMALL), 20)
    networks, sample = agent.networks, agent.replay.sample(200, generator(0, "test"), gamma=0.8)
    sample = sample._replace(terminated=torch.arange(200) % 3 == 0)
    agent.generator.set_state(generator(5, "noise").get_state())
    found = agent.target(sample, agent._next_values(sample.next_observation))
    noise = torch.randn(200, 2, generator=generator(5, "noise")) * 0.4
    assert (noise.abs() > 0.5).any()
    action = (networks.target_actor(sample.next_observation).tanh() + noise.clamp(-0.5, 0.5)).clamp(-1.0, 1.0)
    value = networks.target_critics(sample.next_observation, action).min(0).values
    expected = sample.reward + torch.where(sample.terminated, 0.0, 0.8 * value)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("frequency", [1, 2, 3])
def test_actor_and_targets_follow_actor_frequency(frequency):
    agent, moved = TD3(BOX, BOX, actor_frequency=frequency, seed=0, **SMALL), {"actor": [], "critics": [], "target": []}
    trained(agent, 2)  # learning_starts env steps
    assert agent.updates == 0
    sample = agent.replay.sample(4, generator(0, "test"))
    assert len(sample.reward) == 4
    for _ in range(6):
        before = copy_state(dict(agent.networks.state_dict()))
        agent.learn(1)
        after = dict(agent.networks.state_dict())
        for part, seen in moved.items():
            names = [name for name in before if name.startswith(part)]
            seen.append(any(not torch.equal(before[name], after[name]) for name in names))
    due = [update % frequency == 0 for update in range(1, 7)]
    assert moved == {"actor": due, "critics": [True] * 6, "target": due}


def test_exploration_adds_the_noise_only():
    agent = trained(TD3(BOX, spaces.Box(-2.0, 5.0, (2,)), noise=GaussianNoise(0.05), seed=0, **SMALL), 20)
    x = torch.zeros(4000, 2)
    acted, greedy = agent.select_action(x)[0], agent.policy().select_action(x)[0]
    assert torch.equal(greedy, greedy[:1].expand_as(greedy))
    torch.testing.assert_close((acted - greedy).std(0), torch.full((2,), 0.05 * 3.5), rtol=0.1, atol=0)
    sampled = agent.policy(deterministic=False).select_action(x)[0]
    torch.testing.assert_close((sampled - greedy).std(0), torch.full((2,), 0.05 * 3.5), rtol=0.1, atol=0)


def test_noise_schedule_ends_at_its_horizon():
    agent = trained(TD3(BOX, BOX, noise=GaussianNoise(linear(0.5, 0.0, env_steps=40)), seed=0, **SMALL), 10)
    x = torch.rand(20, 2, generator=generator(0, "rows"))
    assert torch.equal(agent.select_action(x)[0], agent.policy().select_action(x)[0])
    assert torch.equal(agent.policy(deterministic=False).select_action(x)[0], agent.policy().select_action(x)[0])


def test_noise_is_reset_at_episode_starts():
    agent = TD3(BOX, BOX, noise=OrnsteinUhlenbeck(), seed=0, **{**SMALL, "learning_starts": 0, "update_to_data": 1e-6})
    trained(agent, 5)
    walk = agent.noise.state_dict()["state"].clone()
    assert (walk != 0.0).all()
    agent.observe_reset(torch.zeros(4, 2), torch.tensor([True, False, False, True]))
    now = agent.noise.state_dict()["state"]
    assert (now[[0, 3]] == 0.0).all() and torch.equal(now[[1, 2]], walk[[1, 2]])
    yes = torch.ones(4, dtype=torch.bool)
    x = torch.zeros(4, 2)
    agent.record_observation(Transition(x, x, x[:, 0], ~yes, torch.tensor([False, True, False, False]), x, yes, {}))
    now = agent.noise.state_dict()["state"]
    assert (now[1] == 0.0).all() and torch.equal(now[2], walk[2])


@pytest.mark.parametrize("kind", [TD3, DDPG])
@pytest.mark.parametrize("noise", [0.05, GaussianNoise(0.05)])
def test_assigning_noise_after_building_is_rejected(kind, noise):
    agent = kind(BOX, BOX, noise=0.2, seed=0, **SMALL)
    with pytest.raises(
        AttributeError, match=rf"{kind.__name__}\.noise cannot be changed after the agent is built.*constructor"
    ):
        agent.noise = noise
    assert agent.noise.amount() == agent.exploration() == 0.2
    assert trained(agent, 20).updates
