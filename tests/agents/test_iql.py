"""IQL: the contract, its losses, and what it makes of data in which most was done badly."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from gymnasium import spaces

from rein.agents.base.learner import Batch
from rein.agents.iql import IQL, expectile_loss
from rein.envs.pendulum import Pendulum
from rein.testing import AgentContract
from rein.training.offline import fill
from rein.types import Transition

SMALL: dict[str, Any] = {
    "hidden": (16,),
    "batch_size": 16,
    "capacity": 512,
    "train_frequency": 8,
    "update_to_data": 0.125,
}


class TestAgent(AgentContract):
    options: ClassVar[dict[str, Any]] = {"learning_starts": 24}

    def make(self, seed):
        environment = self.environment(1, 0)
        given = environment.single_observation_space, environment.single_action_space
        return IQL(*given, **SMALL, **self.options, seed=seed)

    def environment(self, num_envs, seed):
        return Pendulum(num_envs, seed=seed)


class TestWithEveryPart(TestAgent):
    options: ClassVar[dict[str, Any]] = {
        "critics": 3,
        "activation": "silu",
        "prioritized": True,
        "max_grad_norm": 1.0,
        "n_step": 2,
    }


BOX = spaces.Box(-1.0, 1.0, (1,), np.float32)


def one_step(rows: int = 2000) -> Transition:
    """Episodes of one step in one state, whose reward is highest, 0, for an action of 0.6, and most are far from it."""
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


def test_the_better_actions_are_imitated():
    cloned, weighed = (chosen(trained(inverse_temperature=beta)) for beta in (0.0, 20.0))
    assert abs(cloned) < 0.15  # the middle of all that was done
    assert weighed == pytest.approx(0.6, abs=0.15)


def test_the_value_is_the_expectile_of_what_was_done():
    reward = one_step().reward
    low, middle, high = (
        trained(expectile=tau).networks.state_value(torch.zeros(1, 1)).item() for tau in (0.1, 0.5, 0.9)
    )
    assert low < middle < high < 0.1
    assert middle == pytest.approx(reward.mean().item(), abs=0.2)


def test_the_loss_of_the_value_leans_toward_the_better():
    value = torch.nn.Flatten(0)  # the value of a state is its observation
    batch = Batch(torch.tensor([[0.0], [0.0]]), target=torch.tensor([1.0, -1.0]))
    loss, metrics = expectile_loss(value, batch, 0.9)  # type: ignore[arg-type]  # all of a StateValue it calls
    assert loss.item() == pytest.approx((0.9 + 0.1) / 2)
    better, _ = expectile_loss(value, batch.rows(slice(0, 1)), 0.9)  # type: ignore[arg-type]  # as above
    assert better.item() == pytest.approx(0.9)
    assert metrics["value"].item() == 0.0


def test_the_loss_of_the_value_counts_a_row_by_its_weight():
    value = torch.nn.Flatten(0)
    weight_B, target_B = torch.tensor([2.0, 1.0, 0.0]), torch.tensor([1.0, -1.0, 2.0])
    batch = Batch(torch.tensor([[0.0], [0.0], [0.5]]), target=target_B, weight=weight_B)
    weighed, _ = expectile_loss(value, batch, 0.9)  # type: ignore[arg-type]  # as above
    assert weighed.item() == pytest.approx((2 * 0.9 + 0.1) / 3)


def test_a_weight_of_two_is_a_row_twice_for_everything_that_is_learned():
    """Of rows drawn by priority: the value and the actor are regressions as much as the critics."""
    learned = []
    for index, weight in (([0, 1, 2], [2.0, 1.0, 0.0]), ([0, 0, 1], None)):
        how: dict[str, Any] = {"optimizer": partial(torch.optim.SGD, lr=0.1), "learning_rate": 0.1}
        agent = IQL(BOX, BOX, hidden=(8,), seed=0, **how)
        fill(agent, [one_step(8)])
        sample = agent.replay.take(torch.tensor(index))
        agent.update_from(sample, None if weight is None else torch.tensor(weight), False)
        learned.append(dict(agent.networks.named_parameters()))
    torch.testing.assert_close(*learned)


def test_by_entire_weights_the_value_and_the_actor_are_those_of_the_data_whatever_is_drawn_most():
    """A fifth of the rows has a reward that nobody can foretell: an error that stays, so they are drawn most."""
    generator = torch.Generator().manual_seed(0)
    rare = torch.rand(2000, generator=generator) < 0.2
    action = torch.where(rare, 0.5, -0.5).unsqueeze(1) + 0.05 * torch.randn(2000, 1, generator=generator)
    reward = torch.where(rare, 1.0 + 3.0 * torch.randn(2000, generator=generator), 0.0)
    how: dict[str, Any] = {"expectile": 0.5, "inverse_temperature": 0.0, "prioritized": True, "priority_beta": 1.0}
    agent = IQL(BOX, BOX, hidden=(16,), batch_size=256, learning_rate=1e-2, tau=0.1, gamma=0.0, seed=0, **how)
    fill(agent, [one_step()._replace(action=action, reward=reward)])
    agent.learn(500)
    values, actions = [], []
    for _ in range(20):
        agent.learn(5)
        values.append(agent.networks.state_value(torch.zeros(1, 1)).item())
        actions.append(agent.policy(deterministic=False).select_action(torch.zeros(2000, 1))[0].mean().item())
    assert sum(values) / 20 == pytest.approx(reward.mean().item(), abs=0.2)
    assert sum(actions) / 20 == pytest.approx(action.mean().item(), abs=0.15)


def test_weights_are_bounded():
    agent = trained(updates=1, inverse_temperature=1000.0, max_weight=7.0)
    assert agent.learn(1)["largest_weight"].item() == 7.0


def test_a_value_goes_over_to_the_state_before():
    """Two states in a row, a reward of 1 at the end: the first is worth gamma times as much as the second."""
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


@pytest.mark.parametrize(
    "options",
    [{"expectile": 1.0}, {"expectile": 0.0}, {"inverse_temperature": -1.0}, {"max_weight": 0.0}, {"critics": 0}],
)
def test_numbers_out_of_their_range_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        IQL(BOX, BOX, **options)


def test_what_it_reports_is_what_it_says_it_does():
    found = trained(updates=2).learn(1)
    assert set(IQL.reports) <= set(found)
    assert all(math.isfinite(value.item()) for value in found.values())
