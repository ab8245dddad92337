"""DQN: contract tests, probe environments, and targets."""

from __future__ import annotations

import pytest
import torch
from gymnasium import spaces

import rein
from rein.agents.dqn import DQN
from rein.envs.probes import Corridor
from tests.agents.steps import practice

BOX = spaces.Box(-1.0, 1.0, (2,))
SMALL = {"hidden": (16,), "batch_size": 16, "capacity": 300, "learning_starts": 8}


def fitted(environment, **options) -> DQN:
    return DQN(environment.single_observation_space, environment.single_action_space, **{**SMALL, **options})


def test_n_step_targets_use_the_discount_of_each_row():
    environment = Corridor(4, seed=0)
    agent = fitted(environment, seed=0, n_step=3, gamma=0.5)
    rein.train(agent, environment, epochs=1, iterations=30)
    sample, _ = agent.sample()
    assert set(sample.discount.tolist()) <= {0.0, 0.5, 0.25, 0.125}
    value = agent._target(sample._replace(reward=torch.zeros_like(sample.reward)), sample.next_observation)
    one = agent._target(sample._replace(reward=torch.zeros_like(sample.reward), discount=1.0), sample.next_observation)
    torch.testing.assert_close(value, sample.discount * one)


@pytest.mark.parametrize("start", [0, 3, -2])
def test_action_space_start_is_respected(start):
    """The agent learns the rewarded action and not its neighbour."""
    agent = DQN(BOX, spaces.Discrete(3, start=start), seed=0, **{**SMALL, "learning_rate": 1e-2, "epsilon": 1.0})
    x = torch.zeros(16, 2)
    practice(agent, x, lambda action: (action == start + 1).float(), 20)
    assert {*agent.select_action(x)[0].tolist()} <= {start, start + 1, start + 2}
    assert agent.policy().select_action(x[:1])[0].tolist() == [start + 1]
