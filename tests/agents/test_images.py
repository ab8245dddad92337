"""Agents that look at an image beside other numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces

import rein
from rein.agents.bc import BC
from rein.agents.discrete_sac import DiscreteSAC
from rein.agents.dqn import DQN
from rein.agents.ppo import PPO
from rein.agents.sac import SAC

BOX = spaces.Box(-1.0, 1.0, (2,))
SPACE = spaces.Dict({"camera": spaces.Box(0, 255, (36, 36, 1), np.uint8), "position": BOX})
ON_POLICY = {"rollout_steps": 8, "update_epochs": 2, "minibatches": 2, "hidden": (64,), "learning_rate": 2e-3}
OFF_POLICY = {"batch_size": 32, "learning_starts": 32, "hidden": (32,), "learning_rate": 1e-3, "gamma": 0.5}
AGENTS = {  # and for how many steps they learn
    "PPO": (lambda: PPO(SPACE, spaces.Discrete(2), seed=0, **ON_POLICY), 8 * 32),
    "DQN": (lambda: DQN(SPACE, spaces.Discrete(2), seed=0, epsilon=0.5, **OFF_POLICY), 16),
}


@pytest.mark.parametrize("name", AGENTS)
def test_an_image_beside_other_numbers_is_learned_from(name: str) -> None:
    """Act where it is bright or one stands on the right: what to do depends on both."""
    make, steps = AGENTS[name]
    agent = make()
    bright, right = torch.arange(16) % 2 == 0, torch.arange(16) % 4 < 2
    wanted = (bright | right).long()
    camera = torch.where(bright.view(-1, 1, 1, 1), 200, 20).expand(16, 36, 36, 1).to(torch.uint8)
    position = torch.where(right, 0.5, -0.5).unsqueeze(1).expand(16, 2)
    observation, no = {"camera": camera, "position": position}, torch.zeros(16, dtype=torch.bool)
    for _ in range(steps):
        action, extras = agent.select_action(observation)
        reward = (action == wanted).float()
        agent.record_observation(rein.Transition(observation, action, reward, ~no, no, observation, ~no, extras))
        agent.optimize_model()
    assert agent.policy().select_action(observation)[0].tolist() == wanted.tolist()


@pytest.mark.parametrize("agent", [SAC, DiscreteSAC, BC], ids=lambda agent: agent.__name__)
def test_who_learns_from_vectors_alone_refuses_it(agent: type) -> None:
    action_space = spaces.Discrete(2) if agent is DiscreteSAC else BOX
    with pytest.raises(ValueError, match=r"images"):
        agent(SPACE, action_space)
