"""IQL: contract tests, losses, and learning from data with mostly bad actions."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from rein.agents.base.learner import Batch
from rein.agents.iql import IQL, expectile_loss
from rein.training.offline import fill
from rein.types import Transition

BOX = spaces.Box(-1.0, 1.0, (1,), np.float32)


def one_step(rows: int = 2000) -> Transition:
    """One-step episodes in a single state. The best action is 0.6 with reward 0; most actions are far from it."""
    generator = torch.Generator().manual_seed(0)
    action = torch.rand(rows, 1, generator=generator) * 2 - 1
    yes = torch.ones(rows, dtype=torch.bool)
    still = torch.zeros(rows, 1)
    reward = -4.0 * (action[:, 0] - 0.6).square()
    return Transition(still, action, reward, yes, ~yes, still, yes, {})


def trained(updates: int = 300, **options: Any) -> IQL:
    agent = IQL(BOX, BOX, hidden=(16,), batch_size=64, learning_rate=2e-2, tau=0.1, seed=0, **options)
    fill(agent, [one_step()])
    agent.learn(updates)
    return agent


def chosen(agent: IQL) -> float:
    return agent.policy().select_action(torch.zeros(1, 1))[0].item()


@pytest.mark.slow
def test_better_actions_are_imitated():
    cloned, weighted = (chosen(trained(inverse_temperature=beta)) for beta in (0.0, 20.0))
    assert abs(cloned) < 0.15  # the mean recorded action
    assert weighted == pytest.approx(0.6, abs=0.15)


@pytest.mark.slow
def test_state_value_is_an_expectile_of_recorded_returns():
    reward = one_step().reward
    low, middle, high = (
        trained(expectile=tau).networks.state_value(torch.zeros(1, 1)).item() for tau in (0.1, 0.5, 0.9)
    )
    assert low < middle < high < 0.1
    assert middle == pytest.approx(reward.mean().item(), abs=0.2)


def test_expectile_loss_is_asymmetric():
    value = torch.nn.Flatten(0)  # the value of a state is its observation
    batch = Batch(torch.tensor([[0.0], [0.0]]), target=torch.tensor([1.0, -1.0]))
    loss, metrics = expectile_loss(value, batch, 0.9)  # type: ignore[arg-type]  # only called
    assert loss.item() == pytest.approx((0.9 + 0.1) / 2)
    better, _ = expectile_loss(value, batch.rows(slice(0, 1)), 0.9)  # type: ignore[arg-type]  # as above
    assert better.item() == pytest.approx(0.9)
    assert metrics["value"].item() == 0.0


def test_importance_weight_2_equals_a_duplicated_row():
    """Importance weights apply to the state value and the actor as well as to the critics."""
    learned = []
    for index, weight in (([0, 1, 2], [2.0, 1.0, 0.0]), ([0, 0, 1], None)):
        how: dict[str, Any] = {"optimizer": partial(torch.optim.SGD, lr=0.1), "learning_rate": 0.1}
        agent = IQL(BOX, BOX, hidden=(8,), seed=0, **how)
        fill(agent, [one_step(8)])
        sample = agent.replay.take(torch.tensor(index))
        agent.update_from(sample, None if weight is None else torch.tensor(weight), False)
        learned.append(dict(agent.networks.named_parameters()))
    torch.testing.assert_close(*learned)


def test_weights_are_clipped():
    agent = trained(updates=1, inverse_temperature=1000.0, max_weight=7.0)
    assert agent.learn(1)["largest_weight"].item() == 7.0


def test_values_propagate_to_the_previous_state():
    """Two states in a row and a final reward of 1: the value of the first state is gamma times that of the second."""
    observation = torch.tensor([[0.0], [1.0]]).repeat(200, 1)
    last = torch.tensor([False, True]).repeat(200)
    action = torch.zeros(400, 1)
    data = Transition(observation, action, last.float(), last, ~last & last, observation.roll(-1, 0), ~last | last, {})
    agent = IQL(BOX, BOX, gamma=0.5, hidden=(16,), batch_size=64, learning_rate=2e-2, tau=0.1, seed=0)
    fill(agent, [data])
    agent.learn(300)
    first, second = agent.networks.state_value(torch.tensor([[0.0], [1.0]])).tolist()
    assert (first, second) == (pytest.approx(0.5, abs=0.05), pytest.approx(1.0, abs=0.05))


def test_targets_follow_the_critics():
    agent = IQL(BOX, BOX, hidden=(8,), tau=0.25, seed=0)
    fill(agent, [one_step(64)])
    before = [parameter.clone() for parameter in agent.networks.target_critics.parameters()]
    agent.learn(1)
    networks = agent.networks
    for was, now, goal in zip(before, networks.target_critics.parameters(), networks.critics.parameters(), strict=True):
        torch.testing.assert_close(now, was + 0.25 * (goal - was))


def test_all_declared_metrics_are_reported():
    found = trained(updates=2).learn(1)
    assert set(IQL.reports) <= set(found)
    assert all(math.isfinite(value.item()) for value in found.values())
