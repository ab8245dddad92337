"""Agents whose observations contain an image, or an image and a vector."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces

import rein
from rein.testing.stateful import copy_state, first_difference
from tests.agents.steps import practice

BOX = spaces.Box(-1.0, 1.0, (2,))
SPACE = spaces.Dict({"camera": spaces.Box(0, 255, (36, 36, 1), np.uint8), "position": BOX})
ON_POLICY = {"rollout_steps": 8, "update_epochs": 2, "minibatches": 2, "hidden": (64,), "learning_rate": 2e-3}
OFF_POLICY = {"batch_size": 32, "learning_starts": 32, "hidden": (32,), "learning_rate": 1e-3, "gamma": 0.5}
AGENTS = {  # agent and number of training steps
    "PPO": (lambda: rein.PPO(SPACE, spaces.Discrete(2), seed=0, **ON_POLICY), 8 * 32),
    "DQN": (lambda: rein.DQN(SPACE, spaces.Discrete(2), seed=0, epsilon=0.5, **OFF_POLICY), 16),
}


@pytest.mark.default_cases("PPO")
@pytest.mark.parametrize("name", AGENTS)
def test_learns_from_images_and_vectors(name: str) -> None:
    """The best action is 1 if the image is bright or the position is on the right."""
    make, steps = AGENTS[name]
    agent = make()
    bright, right = torch.arange(16) % 2 == 0, torch.arange(16) % 4 < 2
    target = (bright | right).long()
    camera = torch.where(bright.view(-1, 1, 1, 1), 200, 20).expand(16, 36, 36, 1).to(torch.uint8)
    position = torch.where(right, 0.5, -0.5).unsqueeze(1).expand(16, 2)
    observation = {"camera": camera, "position": position}
    practice(agent, observation, lambda action: (action == target).float(), steps)
    assert agent.policy().select_action(observation)[0].tolist() == target.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(36, 36, 1), (2, 36, 36)])
@pytest.mark.parametrize("kind", [rein.PPO, rein.DQN], ids=lambda kind: kind.__name__)
def test_learns_from_images_with_channels_first_or_last(kind: type, shape: tuple[int, ...]) -> None:
    options = {**ON_POLICY, "hidden": (16,)} if kind is rein.PPO else {**OFF_POLICY, "epsilon": 0.5}
    agent = kind(spaces.Box(0, 255, shape, np.uint8), spaces.Discrete(2), seed=0, **options)
    encoder = (agent.networks if kind is rein.PPO else agent.networks.online).encoder
    initial = copy_state(dict(encoder.state_dict()))
    bright = torch.arange(16) % 2 == 0
    image = torch.where(bright.view(-1, 1, 1, 1), 200, 20).expand(16, *shape).to(torch.uint8)
    practice(agent, image, lambda action: (action == bright.long()).float(), 8 * 8 if kind is rein.PPO else 12)
    assert agent.policy().select_action(image)[0].tolist() == bright.long().tolist()
    assert first_difference(initial, dict(encoder.state_dict())) is not None
    if kind is rein.DQN:
        assert agent.replay.columns["observation"].dtype is torch.uint8


@pytest.mark.parametrize("agent", [rein.SAC, rein.DiscreteSAC, rein.BC], ids=lambda agent: agent.__name__)
def test_vector_only_agents_reject_images(agent: type) -> None:
    action_space = spaces.Discrete(2) if agent is rein.DiscreteSAC else BOX
    with pytest.raises(ValueError, match=r"images"):
        agent(SPACE, action_space)
