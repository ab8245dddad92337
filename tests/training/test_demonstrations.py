"""Demonstrations in the batches of agents with a replay, and random subsets of critics."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gymnasium import spaces

import rein
from rein.ops.random import generator
from rein.testing.stateful import first_difference
from rein.types import Transition

BOX = spaces.Box(-1.0, 1.0, (2,))
SMALL: dict[str, Any] = {"hidden": (8,), "batch_size": 16, "capacity": 200, "learning_starts": 8, "seed": 0}


def rows(count: int, reward: float, *, seed: int = 0) -> Transition:
    observation, action, after = torch.rand(3, count, 2, generator=generator(seed, "rows"))
    no = torch.zeros(count, dtype=torch.bool)
    return Transition(observation, action, torch.full((count,), reward), no, ~no, after, ~no, {})


def shown(kind: Any = rein.SAC, **options: Any) -> Any:
    """Return an agent with 30 demonstrations of reward 1 and 40 own transitions of reward 0."""
    agent = kind(BOX, BOX, **{**SMALL, **options})
    rein.fill_replay(agent, [rows(20, 1.0), rows(10, 1.0, seed=1)], demonstrations=True)
    for step in range(10):
        agent.record_observation(rows(4, 0.0, seed=step))
    return agent


@pytest.mark.parametrize("options", [{}, {"n_step": 3}, {"prioritized": True}])
@pytest.mark.parametrize(("fraction", "expected"), [(0.5, 8), (0.2, 3), (0.0, 0)])
def test_fraction_of_each_batch_comes_from_demonstrations(
    fraction: float, expected: int, options: dict[str, Any]
) -> None:
    agent = shown(demonstration_fraction=fraction, **options)
    assert len(agent.demonstrations) == 30 and len(agent.replay) == 40
    for _ in range(3):
        sample, weight = agent.sample()
        assert sample.reward.tolist() == [0.0] * (16 - expected) + [1.0] * expected
        assert len(sample.observation) == 16 and len(sample.row) == 16 - expected
        assert weight is None or weight[16 - expected :].tolist() == [1.0] * expected
    agent.learn(2)


def test_agent_with_demonstrations_resumes_exactly(tmp_path: Any) -> None:
    environment = rein.envs.Pendulum(num_envs=2, seed=0)
    agent = rein.SAC(environment, **{**SMALL, "prioritized": True})
    no, count = torch.zeros(12, dtype=torch.bool), 12
    states, actions, after = torch.rand(count, 3), torch.rand(count, 1), torch.rand(count, 3)
    data = Transition(states, actions, torch.ones(count), no, ~no, after, ~no, {})
    rein.fill_replay(agent, [data], demonstrations=True)
    rein.train(agent, environment, env_steps=40)
    rein.save(agent, tmp_path / "agent.h5")
    loaded = rein.load_agent(tmp_path / "agent.h5")
    for each in (agent, loaded):
        each.learn(3)
    assert first_difference(agent.state_dict(), loaded.state_dict()) is None
    plain = rein.SAC(environment, **{**SMALL, "prioritized": True})
    agent.load_state_dict(plain.state_dict())
    assert not hasattr(agent, "demonstrations")


def test_target_takes_the_minimum_of_a_random_subset() -> None:
    agent = shown(critics=4, target_subset=2)
    value = torch.tensor([[0.0], [1.0], [2.0], [3.0]])
    found = [float(agent.lowest(value)) for _ in range(200)]
    share = [found.count(float(k)) / 200 for k in range(4)]
    assert share == pytest.approx([3 / 6, 2 / 6, 1 / 6, 0.0], abs=0.1)
    with pytest.raises(ValueError, match="target_subset"):
        shown(critics=2, target_subset=3)
