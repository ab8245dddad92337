"""Behaviour cloning: contract tests and imitation of recorded actions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces

from rein.agents.base.imitation import likelihood_loss
from rein.agents.base.learner import Batch
from rein.agents.bc import BC, cross_entropy_loss, squared_action_loss
from rein.networks.off_policy import Actor, Layers
from rein.training.offline import fill_replay
from rein.types import Transition

SMALL = {"hidden": (16,), "batch_size": 16, "capacity": 512, "learning_starts": 24, "train_frequency": 8}
SMALL |= {"update_to_data": 0.125}


def recorded(observation, action) -> Transition:
    """Return transitions with zero rewards and no episode ends."""
    rows = len(observation)
    no = torch.zeros(rows, dtype=torch.bool)
    return Transition(observation, action, torch.zeros(rows), no, no, observation, ~no, {})


def states(rows: int = 512) -> torch.Tensor:
    return torch.rand(rows, 3, generator=torch.Generator().manual_seed(0)) * 2 - 1


BOX = spaces.Box(-1.0, 1.0, (3,), np.float32)


@pytest.mark.parametrize("start", [0, 5])
def test_discrete_actions_are_cloned(start):
    observation = states()
    action = start + (observation[:, 0] > 0).long() + (observation[:, 1] > 0).long()
    agent = BC(BOX, spaces.Discrete(3, start=start), hidden=(32,), learning_rate=1e-2, seed=0)
    fill_replay(agent, [recorded(observation, action)])
    agent.learn(300)
    chosen, _ = agent.policy().select_action(observation)
    assert (chosen == action).float().mean() > 0.95


@pytest.mark.parametrize("stochastic", [True, False])
def test_continuous_actions_are_cloned_in_units_of_the_space(stochastic):
    observation = states()
    action = torch.stack([2.0 + observation[:, 0], 10.0 * observation[:, 1] * observation[:, 2]], 1)
    space = spaces.Box(np.array([0.0, -20.0], np.float32), np.array([4.0, 20.0], np.float32))
    agent = BC(BOX, space, hidden=(32,), learning_rate=1e-2, stochastic=stochastic, seed=0)
    fill_replay(agent, [recorded(observation, action)])
    agent.learn(500)
    chosen, _ = agent.policy().select_action(observation)
    assert ((chosen - action).abs().mean(0) < torch.tensor([0.1, 1.0])).all()


def test_random_actions_are_cloned_with_their_probabilities():
    observation = torch.zeros(2000, 3)
    generator = torch.Generator().manual_seed(1)
    often = (torch.rand(2000, generator=generator) < 0.8).long()
    agent = BC(BOX, spaces.Discrete(2), hidden=(8,), learning_rate=1e-2, seed=0)
    fill_replay(agent, [recorded(observation, often)])
    agent.learn(300)
    for chosen in (
        agent.policy(deterministic=False).select_action(observation)[0],
        agent.select_action(observation)[0],
    ):
        assert 0.75 < chosen.float().mean() < 0.85
    assert (agent.policy().select_action(observation)[0] == 1).all()


def test_standard_deviation_of_actions_is_learned():
    observation = torch.zeros(4000, 3)
    generator = torch.Generator().manual_seed(1)
    action = (0.3 + 0.5 * torch.randn(4000, 1, generator=generator)).tanh()
    agent = BC(BOX, spaces.Box(-1.0, 1.0, (1,), np.float32), hidden=(8,), learning_rate=1e-2, seed=0)
    fill_replay(agent, [recorded(observation, action)])
    agent.learn(300)
    distribution = agent.networks.actor.distribution(torch.zeros(1, 3))
    assert distribution.mean.item() == pytest.approx(0.3, abs=0.1)
    assert distribution.log_std.exp().item() == pytest.approx(0.5, abs=0.1)


def network(*, stochastic: bool) -> Actor:
    return Actor(3, 2, Layers((16,), "relu", torch.Generator().manual_seed(0)), stochastic=stochastic)


def test_gradient_is_finite_for_actions_at_the_bounds():
    batch = Batch(states(4), torch.tensor([[1.0, -1.0]]).expand(4, 2))
    networks = network(stochastic=True)
    loss, metrics = likelihood_loss(networks, batch, None)
    gradients = torch.autograd.grad(loss, [*networks.parameters()])
    assert all(torch.isfinite(x).all() for x in (loss, metrics["error"], *gradients))
    assert loss < 50.0


@pytest.mark.parametrize(("log_std", "decreases"), [(-4.0, True), (-8.0, False)])
def test_standard_deviation_of_deterministic_data_stops_decreasing(log_std, decreases):
    networks = network(stochastic=True)
    with torch.no_grad():
        networks.head.weight.zero_()
        networks.head.bias.copy_(torch.tensor([0.5, -0.5, log_std, log_std]))
    done = torch.tensor([[0.5, -0.5]]).tanh().expand(4, 2)
    loss, _ = likelihood_loss(networks, Batch(states(4), done), None)
    (gradient,) = torch.autograd.grad(loss, [networks.head.bias])
    assert ((gradient[2:] > 0.0) == decreases).all()


@pytest.mark.parametrize("loss", [likelihood_loss, squared_action_loss])
def test_weight_2_equals_a_duplicated_row(loss):
    networks, x = network(stochastic=loss is likelihood_loss), states(3)
    action = torch.tensor([[0.1, 0.2], [0.3, -0.4], [-0.9, 0.5]])
    weighted, _ = loss(networks, Batch(x, action, weight=torch.tensor([2.0, 1.0, 0.0])), None)
    twice = torch.tensor([0, 0, 1])
    plain, _ = loss(networks, Batch(x[twice], action[twice]), None)
    torch.testing.assert_close(weighted, plain)


def test_likelihood_error_is_the_distance_to_the_mean():
    networks, x = network(stochastic=True), states(2)
    with torch.no_grad():
        networks.head.weight.zero_()
        networks.head.bias.copy_(torch.tensor([0.5, -0.5, -4.0, -4.0]))  # narrow: -log pi is far below 0 at the mean
    middle = torch.tensor([0.5, -0.5]).tanh()
    batch = Batch(x, torch.stack((middle, middle + torch.tensor([0.0, 0.3]))))
    loss, metrics = likelihood_loss(networks, batch.rows(slice(0, 1)), None)
    assert loss < -4.0 and metrics["error"].item() == pytest.approx(0.0, abs=1e-6)
    assert likelihood_loss(networks, batch, None)[1]["error"].tolist() == pytest.approx([0.0, 0.09], abs=1e-6)


def test_cross_entropy_is_the_negative_log_likelihood():
    logits = torch.tensor([[0.0, 1.0], [2.0, -1.0]])
    loss, metrics = cross_entropy_loss(torch.nn.Identity(), Batch(logits, torch.tensor([1, 0])), None)
    torch.testing.assert_close(metrics["error"], -logits.log_softmax(1)[[0, 1], [1, 0]])
    torch.testing.assert_close(loss, metrics["error"].mean())


def test_unbounded_action_space_is_rejected():
    with pytest.raises(ValueError, match="finite bounds"):
        BC(BOX, spaces.Box(-np.inf, np.inf, (1,), np.float32))
