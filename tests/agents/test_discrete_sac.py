"""Soft actor-critic for discrete actions: contract tests, losses computed by hand, and probe environments."""

from __future__ import annotations

import math

import pytest
import torch

import rein
from rein.agents.base.learner import Batch
from rein.agents.discrete_sac import DiscreteSAC, critic_loss
from rein.envs.gridworld import Gridworld
from rein.envs.probes import Bandit
from rein.networks.off_policy import ActionValues, Layers
from rein.ops.random import generator

SMALL = {"hidden": (16,), "batch_size": 16, "learning_starts": 20, "capacity": 200, "update_to_data": 0.25}


def rows(features: int = 3, actions: int = 4, size: int = 5) -> Batch:
    drawing = generator(0, "rows")
    x = torch.randn(size, features, generator=drawing)
    action = torch.randint(actions, (size,), generator=drawing)
    return Batch(x, action, target=torch.randn(size, generator=drawing))


def test_critic_loss_matches_hand_computation() -> None:
    batch, critics = rows(), ActionValues(2, 3, 4, Layers((8,), "relu", generator(0, "critics")))
    loss, metrics = critic_loss(critics, batch, None)
    value = critics(batch.features).detach()
    errors = [[float(value[k, b, batch.action[b]] - batch.target[b]) for b in range(5)] for k in range(2)]
    assert float(loss.detach()) == pytest.approx(sum(0.5 * sum(e * e for e in row) / 5 for row in errors), rel=1e-5)
    assert metrics["td_error"].tolist() == pytest.approx([(abs(a) + abs(b)) / 2 for a, b in zip(*errors, strict=True)])
    assert not torch.equal(value[0], value[1])


def test_temperature_decreases_above_the_target_entropy() -> None:
    environment = Bandit(num_envs=8, seed=0)
    spaces_of = environment.single_observation_space, environment.single_action_space
    low_target, high_target = (
        DiscreteSAC(*spaces_of, **SMALL, learning_rate=1e-2, target_entropy=target, seed=0) for target in (0.0, 9.0)
    )
    for agent in (low_target, high_target):
        rein.train(agent, Bandit(num_envs=8, seed=0), env_steps=160, seed=0)
    less, more = (float(agent.networks.temperature.log.detach()) for agent in (low_target, high_target))
    assert less < 0.0 < more


def test_default_target_entropy_is_half_the_maximum() -> None:
    environment = Gridworld(num_envs=1, seed=0)
    agent = DiscreteSAC(environment.single_observation_space, environment.single_action_space)
    assert agent._target_entropy == pytest.approx(0.5 * math.log(4))
