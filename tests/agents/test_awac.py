"""AWAC: contract tests, advantage weights, and learning from data with mostly bad actions."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from rein.agents.awac import AWAC, advantage_weight
from rein.training.offline import fill
from rein.types import Transition

BOX = spaces.Box(-1.0, 1.0, (1,), np.float32)


def one_step(rows: int = 2000) -> Transition:
    """One-step episodes in a single state. The best action is 0.6 with reward 0; most actions are far from it."""
    generator = torch.Generator().manual_seed(0)
    action = torch.rand(rows, 1, generator=generator) * 2 - 1
    yes = torch.ones(rows, dtype=torch.bool)
    still = torch.zeros(rows, 1)
    return Transition(still, action, -4.0 * (action[:, 0] - 0.6).square(), yes, ~yes, still, yes, {})


def trained(updates: int = 300, **options: Any) -> AWAC:
    agent = AWAC(BOX, BOX, hidden=(16,), batch_size=64, learning_rate=2e-2, tau=0.1, seed=0, **options)
    fill(agent, [one_step()])
    agent.learn(updates)
    return agent


def chosen(agent: AWAC) -> float:
    return agent.policy().select_action(torch.zeros(1, 1))[0].item()


@pytest.mark.default_cases("softmax")
@pytest.mark.parametrize("weights", ["softmax", "exp"])
def test_better_actions_are_imitated(weights):
    assert abs(chosen(trained(temperature=1e3, weights=weights))) < 0.15  # equal weights: the mean recorded action
    assert chosen(trained(temperature=0.1, weights=weights)) == pytest.approx(0.6, abs=0.15)


def test_softmax_weights_have_mean_1_and_exponential_ratios():
    advantage = torch.tensor([0.5, -1.0, 2.0])
    softmax, exponential = (advantage_weight(advantage, name) for name in ("softmax", "exp"))
    assert softmax.mean().item() == pytest.approx(1.0)
    torch.testing.assert_close(softmax / softmax[0], exponential / exponential[0])
    torch.testing.assert_close(exponential, advantage.exp())


def test_importance_weight_2_equals_a_duplicated_row():
    """Importance weights apply to the actor as well as to the critics."""
    learned = []
    for index, weight in (([0, 1, 2], [2.0, 1.0, 0.0]), ([0, 0, 1], None)):
        how: dict[str, Any] = {"optimizer": partial(torch.optim.SGD, lr=0.1), "learning_rate": 0.1, "temperature": 1e9}
        agent = AWAC(BOX, BOX, hidden=(8,), seed=0, **how)  # equal weights for all advantages
        fill(agent, [one_step(8)])
        sample = agent.replay.take(torch.tensor(index))
        agent.update_from(sample, None if weight is None else torch.tensor(weight), False)
        learned.append(dict(agent.networks.actor.named_parameters()))
    torch.testing.assert_close(*learned)


def test_weights_are_clipped():
    agent = trained(updates=1, temperature=1e-3, max_weight=3.0)
    assert agent.learn(1)["largest_weight"].item() == 3.0


def test_critics_bootstrap_from_the_next_state():
    """Two states in a row and a final reward of 1: every action in the first state has value gamma."""
    observation = torch.tensor([[0.0], [1.0]]).repeat(200, 1)
    last = torch.tensor([False, True]).repeat(200)
    action = torch.rand(400, 1, generator=torch.Generator().manual_seed(0)) * 2 - 1
    data = Transition(observation, action, last.float(), last, ~last & last, observation.roll(-1, 0), ~last | last, {})
    agent = AWAC(BOX, BOX, gamma=0.5, hidden=(16,), batch_size=64, learning_rate=2e-2, tau=0.1, seed=0)
    fill(agent, [data])
    agent.learn(300)
    value = agent.networks.critics(torch.tensor([[0.0], [1.0]]), torch.zeros(2, 1)).mean(0)
    assert value.tolist() == [pytest.approx(0.5, abs=0.1), pytest.approx(1.0, abs=0.1)]


def test_all_declared_metrics_are_reported():
    found = trained(updates=2).learn(1)
    assert set(AWAC.reports) <= set(found)
