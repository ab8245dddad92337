"""AWAC and IQL: weights of recorded actions, losses, and learning from data with mostly bad actions."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

import rein
from rein.agents.awac import advantage_weight
from rein.agents.base.learner import Batch
from rein.agents.iql import expectile_loss
from rein.training.offline import fill_replay
from rein.types import Transition

BOX = spaces.Box(-1.0, 1.0, (1,), np.float32)
BOTH = pytest.mark.parametrize("kind", [rein.AWAC, rein.IQL], ids=lambda kind: kind.__name__)


def one_step(rows: int = 2000) -> Transition:
    """One-step episodes in a single state. The best action is 0.6 with reward 0; most actions are far from it."""
    action = torch.rand(rows, 1, generator=torch.Generator().manual_seed(0)) * 2 - 1
    yes, still = torch.ones(rows, dtype=torch.bool), torch.zeros(rows, 1)
    return Transition(still, action, -4.0 * (action[:, 0] - 0.6).square(), yes, ~yes, still, yes, {})


def trained(kind: Any, updates: int = 300, data: Transition | None = None, **options: Any) -> Any:
    agent = kind(BOX, BOX, hidden=(16,), batch_size=64, learning_rate=2e-2, tau=0.1, seed=0, **options)
    fill_replay(agent, [data or one_step()])
    agent.learn(updates)
    return agent


@pytest.mark.default_cases("AWAC-equal1-sharp1")
@pytest.mark.parametrize(
    ("kind", "equal", "sharp"),
    [
        (rein.AWAC, {"temperature": 1e3, "weights": "exp"}, {"temperature": 0.1, "weights": "exp"}),
        (rein.AWAC, {"temperature": 1e3}, {"temperature": 0.1}),
        (rein.IQL, {"inverse_temperature": 0.0}, {"inverse_temperature": 20.0}),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_better_actions_are_imitated(kind: Any, equal: dict[str, Any], sharp: dict[str, Any]) -> None:
    cloned, weighted = (
        trained(kind, **options).policy().select_action(torch.zeros(1, 1))[0].item() for options in (equal, sharp)
    )
    assert abs(cloned) < 0.15  # equal weights: the mean recorded action
    assert weighted == pytest.approx(0.6, abs=0.15)


def test_softmax_weights_have_mean_1_and_exponential_ratios() -> None:
    advantage = torch.tensor([0.5, -1.0, 2.0])
    softmax, exponential = (advantage_weight(advantage, name) for name in ("softmax", "exp"))
    assert softmax.mean().item() == pytest.approx(1.0)
    torch.testing.assert_close(softmax / softmax[0], exponential / exponential[0])
    torch.testing.assert_close(exponential, advantage.exp())


@pytest.mark.parametrize(
    ("kind", "part", "options"), [(rein.AWAC, "actor", {"temperature": 1e9}), (rein.IQL, "", {})], ids=["AWAC", "IQL"]
)
def test_importance_weight_2_equals_a_duplicated_row(kind: Any, part: str, options: dict[str, Any]) -> None:
    """Importance weights apply to the actor and the state value as well as to the critics."""
    learned = []
    for index, weight in (([0, 1, 2], [2.0, 1.0, 0.0]), ([0, 0, 1], None)):
        how: dict[str, Any] = {"optimizer": partial(torch.optim.SGD, lr=0.1), "learning_rate": 0.1, **options}
        agent = kind(BOX, BOX, hidden=(8,), seed=0, **how)
        fill_replay(agent, [one_step(8)])
        sample = agent.replay.take(torch.tensor(index))
        agent.update_from(sample, None if weight is None else torch.tensor(weight), False)
        learned.append(dict(agent.networks.get_submodule(part).named_parameters()))
    torch.testing.assert_close(*learned)


@pytest.mark.parametrize(
    ("kind", "sharp"), [(rein.AWAC, {"temperature": 1e-3}), (rein.IQL, {"inverse_temperature": 1e3})]
)
def test_weights_are_clipped(kind: Any, sharp: dict[str, float]) -> None:
    agent = trained(kind, updates=1, max_weight=3.0, **sharp)
    assert agent.learn(1)["largest_weight"].item() == 3.0


@BOTH
def test_values_propagate_to_the_previous_state(kind: Any) -> None:
    """Two states in a row and a final reward of 1: every action in the first state has value gamma."""
    observation = torch.tensor([[0.0], [1.0]]).repeat(200, 1)
    last = torch.tensor([False, True]).repeat(200)
    action = torch.rand(400, 1, generator=torch.Generator().manual_seed(0)) * 2 - 1
    data = Transition(observation, action, last.float(), last, ~last & last, observation.roll(-1, 0), ~last | last, {})
    networks = trained(kind, data=data, gamma=0.5).networks
    x = torch.tensor([[0.0], [1.0]])
    found = networks.state_value(x) if kind is rein.IQL else networks.critics(x, torch.zeros(2, 1)).mean(0)
    assert found.tolist() == [pytest.approx(0.5, abs=0.1), pytest.approx(1.0, abs=0.1)]


@BOTH
def test_all_declared_metrics_are_reported(kind: Any) -> None:
    found = trained(kind, updates=2).learn(1)
    assert {*kind.reports} <= {*found}
    assert all(math.isfinite(value.item()) for value in found.values())


@pytest.mark.slow
def test_state_value_is_an_expectile_of_recorded_returns() -> None:
    low, middle, high = (
        trained(rein.IQL, expectile=tau).networks.state_value(torch.zeros(1, 1)).item() for tau in (0.1, 0.5, 0.9)
    )
    assert low < middle < high < 0.1
    assert middle == pytest.approx(one_step().reward.mean().item(), abs=0.2)


def test_expectile_loss_is_asymmetric() -> None:
    value: Any = torch.nn.Flatten(0)  # the value of a state is its observation
    batch = Batch(torch.tensor([[0.0], [0.0]]), target=torch.tensor([1.0, -1.0]))
    loss, metrics = expectile_loss(value, batch, 0.9)
    assert loss.item() == pytest.approx((0.9 + 0.1) / 2)
    better, _ = expectile_loss(value, batch.rows(slice(0, 1)), 0.9)
    assert better.item() == pytest.approx(0.9)
    assert metrics["value"].item() == 0.0


def test_targets_follow_the_critics() -> None:
    agent = rein.IQL(BOX, BOX, hidden=(8,), tau=0.25, seed=0)
    fill_replay(agent, [one_step(64)])
    before = [parameter.clone() for parameter in agent.networks.target_critics.parameters()]
    agent.learn(1)
    networks = agent.networks
    for was, now, goal in zip(before, networks.target_critics.parameters(), networks.critics.parameters(), strict=True):
        torch.testing.assert_close(now, was + 0.25 * (goal - was))


@pytest.mark.slow
def test_importance_weights_correct_value_and_actor() -> None:
    """A fifth of the rows has random rewards. Their errors stay large, so they are sampled most often."""
    generator = torch.Generator().manual_seed(0)
    rare = torch.rand(2000, generator=generator) < 0.2
    action = torch.where(rare, 0.5, -0.5).unsqueeze(1) + 0.05 * torch.randn(2000, 1, generator=generator)
    reward = torch.where(rare, 1.0 + 3.0 * torch.randn(2000, generator=generator), 0.0)
    how: dict[str, Any] = {"expectile": 0.5, "inverse_temperature": 0.0, "prioritized": True, "priority_beta": 1.0}
    agent = rein.IQL(BOX, BOX, hidden=(16,), batch_size=256, learning_rate=1e-2, tau=0.1, gamma=0.0, seed=0, **how)
    fill_replay(agent, [one_step()._replace(action=action, reward=reward)])
    agent.learn(500)
    values, actions = [], []
    for _ in range(20):
        agent.learn(5)
        values.append(agent.networks.state_value(torch.zeros(1, 1)).item())
        actions.append(agent.policy(deterministic=False).select_action(torch.zeros(2000, 1))[0].mean().item())
    assert sum(values) / 20 == pytest.approx(reward.mean().item(), abs=0.2)
    assert sum(actions) / 20 == pytest.approx(action.mean().item(), abs=0.15)
