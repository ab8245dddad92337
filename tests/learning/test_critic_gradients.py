"""The closed-form gradients of critics, actors and Q-networks match autograd."""

from __future__ import annotations

import math

import pytest
import torch
from gymnasium import spaces

from rein.accelerate.closed_form import (
    critic_gradient,
    deterministic_actor_gradient,
    has_closed_form,
    soft_actor_gradient,
    td_gradient,
)
from rein.accelerate.fast_learner import FastLearner
from rein.agents.base.actor_and_critics import critic_loss
from rein.agents.base.deterministic import deterministic_actor_loss
from rein.agents.base.learner import Batch, Learner
from rein.agents.base.soft_actor_critic import soft_actor_loss
from rein.agents.dqn import td_loss
from rein.networks.off_policy import LOG_STD, Actor, Critics, Layers
from rein.networks.q_networks import QNetwork

FEATURES, ACTIONS, ROWS = 5, 3, 37
OBSERVATION, DISCRETE = spaces.Box(-1.0, 1.0, (FEATURES,)), spaces.Discrete(4)
SHARES = [None, 0.25, torch.tensor(0.3, dtype=torch.float64)]


class CustomEncoder(torch.nn.Linear):
    features = FEATURES

    def __init__(self, *given):
        super().__init__(FEATURES, FEATURES)


def drawn(seed=0):
    return torch.Generator().manual_seed(seed)


def normal(*shape, seed):
    return torch.randn(*shape, generator=drawn(seed), dtype=torch.float64)


def critics_of(members, activation, hidden=(16, 8)) -> Critics:
    made = Critics(members, FEATURES, ACTIONS, Layers(hidden, activation, drawn())).double()
    for parameter in made.parameters():  # change zero biases too, so that all parts of the gradient matter
        parameter.data.add_(normal(*parameter.shape, seed=parameter.numel()), alpha=0.2)
    return made


def actor_of(activation, stochastic, spread=1.0) -> Actor:
    made = Actor(FEATURES, ACTIONS, Layers((16, 8), activation, drawn(1)), stochastic=stochastic).double()
    made.head.weight.data.mul_(50.0 * spread)  # enlarge the small initial weights
    made.head.bias.data.add_(normal(len(made.head.bias), seed=5), alpha=0.3)
    return made


def compare(networks, batch, coefficients, loss, gradient, share, rtol=1e-9, atol=1e-13):
    value, metrics = loss(networks, batch, coefficients)
    scale = 1.0 if share is None else share
    expected = torch.autograd.grad(value * scale, [*networks.parameters()])
    found, reported = gradient(networks, batch, coefficients, share, report=True)
    for (name, parameter), one, other in zip(networks.named_parameters(), expected, found, strict=True):
        assert other.shape == parameter.shape, name
        torch.testing.assert_close(other, one, rtol=rtol, atol=atol, msg=lambda text, name=name: f"{name}: {text}")
    assert reported.keys() == metrics.keys()
    for name, metric in metrics.items():
        torch.testing.assert_close(reported[name], metric if metric.ndim else metric * scale, rtol=1e-9, atol=1e-13)
    _, quiet = gradient(networks, batch, coefficients, share, report=False)
    assert quiet.keys() == loss(networks, batch, coefficients, report=False)[1].keys()


@pytest.mark.parametrize("share", SHARES, ids=str)
@pytest.mark.parametrize("weighted", [False, True], ids=["alike", "weighted"])
@pytest.mark.parametrize("activation", ["relu", "tanh"])
@pytest.mark.parametrize("members", [1, 2, 3])
def test_critic_gradient_matches_autograd(members, activation, weighted, share):
    weight = normal(ROWS, seed=4).abs() if weighted else None
    batch = Batch(
        normal(ROWS, FEATURES, seed=1), normal(ROWS, ACTIONS, seed=2).tanh(), target=normal(ROWS, seed=3), weight=weight
    )
    compare(critics_of(members, activation), batch, None, critic_loss, critic_gradient, share)


@pytest.mark.parametrize("share", SHARES, ids=str)
@pytest.mark.parametrize("temperature", [0.0, 0.2], ids=str)
@pytest.mark.parametrize("activation", ["relu", "tanh"])
@pytest.mark.parametrize("members", [1, 2, 3])
def test_soft_actor_gradient_matches_autograd(members, activation, temperature, share):
    critics, alpha = critics_of(members, activation), torch.tensor(temperature, dtype=torch.float64)
    batch = Batch(normal(ROWS, FEATURES, seed=1), noise=normal(ROWS, ACTIONS, seed=2))
    chosen = critics(batch.features, actor_of(activation, True)(batch.features)[:, :ACTIONS].tanh()).min(0).indices
    assert len(chosen.unique()) == members  # every critic is the smallest in some rows
    compare(actor_of(activation, True), batch, (critics, alpha), soft_actor_loss, soft_actor_gradient, share)


def test_soft_actor_gradient_with_clamped_log_std():
    actor, batch = (
        actor_of("relu", True, 100.0),
        Batch(normal(ROWS, FEATURES, seed=1), noise=normal(ROWS, ACTIONS, seed=2)),
    )
    log_std = actor(batch.features)[:, ACTIONS:]
    assert (log_std > LOG_STD[1]).any() and (log_std < LOG_STD[0]).any()
    coefficients = (critics_of(2, "relu"), torch.tensor(0.2, dtype=torch.float64))
    # autograd divides by a standard deviation of exp(-20) and multiplies by it again
    compare(actor, batch, coefficients, soft_actor_loss, soft_actor_gradient, None, atol=1e-6)
    assert all(torch.isfinite(g).all() for g in soft_actor_gradient(actor, batch, coefficients, None, report=False)[0])


@pytest.mark.parametrize("share", SHARES, ids=str)
@pytest.mark.parametrize("activation", ["relu", "tanh"])
@pytest.mark.parametrize("members", [1, 2])
def test_deterministic_actor_gradient_matches_autograd(members, activation, share):
    batch = Batch(normal(ROWS, FEATURES, seed=1), noise=normal(ROWS, ACTIONS, seed=2))
    critics = critics_of(members, activation)
    compare(
        actor_of(activation, False), batch, (critics,), deterministic_actor_loss, deterministic_actor_gradient, share
    )


@pytest.mark.parametrize("share", SHARES, ids=str)
@pytest.mark.parametrize("weighted", [False, True], ids=["alike", "weighted"])
@pytest.mark.parametrize("delta", [None, 0.3], ids=["squares", "huber"])
def test_td_gradient_matches_autograd(delta, weighted, share):
    network = QNetwork(OBSERVATION, DISCRETE, drawn(), hidden=(16, 8), layer_norm=False).double()
    assert has_closed_form(network)
    target, weight = 3.0 * normal(ROWS, seed=3), normal(ROWS, seed=4).abs() if weighted else None
    action = torch.randint(4, (ROWS,), generator=drawn(2))
    batch = Batch(normal(ROWS, FEATURES, seed=1), action, target=target, weight=weight)
    compare(network, batch, delta, td_loss, td_gradient, share)


@pytest.mark.parametrize(
    "networks",
    [
        lambda: Critics(2, FEATURES, ACTIONS, Layers((8,), "silu", drawn())),
        lambda: Critics(2, FEATURES, ACTIONS, Layers((), "relu", drawn())),
        lambda: Critics(2, FEATURES, ACTIONS, Layers((8,), "relu", drawn()), CustomEncoder()),
        lambda: QNetwork(OBSERVATION, DISCRETE, drawn(), layer_norm=True),
        lambda: QNetwork(OBSERVATION, DISCRETE, drawn(), layer_norm=False, dueling=True),
        lambda: QNetwork(OBSERVATION, DISCRETE, drawn(), layer_norm=False, hidden=()),
        lambda: QNetwork(OBSERVATION, DISCRETE, drawn(), layer_norm=False, encoder=CustomEncoder),
    ],
)
def test_unsupported_networks_have_no_closed_form(networks):
    assert not has_closed_form(networks())
    assert has_closed_form(critics_of(1, "tanh"))


def test_actor_loss_has_no_gradient_for_critics():
    critics, actor = critics_of(2, "relu"), actor_of("relu", True)
    batch = Batch(normal(ROWS, FEATURES, seed=1), noise=normal(ROWS, ACTIONS, seed=2))
    loss, _ = soft_actor_loss(actor, batch, (critics, torch.tensor(0.1, dtype=torch.float64)))
    assert torch.autograd.grad(loss, [*critics.parameters()], allow_unused=True) == (None,) * 6


def test_critic_loss_sums_half_mean_squared_errors():
    critics = critics_of(3, "relu")
    batch = Batch(normal(ROWS, FEATURES, seed=1), normal(ROWS, ACTIONS, seed=2), target=normal(ROWS, seed=3))
    value_KB = critics(batch.features, batch.action)
    expected = sum(0.5 * torch.nn.functional.mse_loss(value_B, batch.target) for value_B in value_KB)
    loss, metrics = critic_loss(critics, batch, None)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(metrics["td_error"], (value_KB - batch.target).abs().mean(0))


def test_log_prob_is_summed_over_action_dimensions():
    """The log probability of a row does not depend on other rows and matches torch's Gaussian with tanh."""
    actor, features, noise = actor_of("relu", True), normal(ROWS, FEATURES, seed=1), normal(ROWS, ACTIONS, seed=2)
    coefficients = (critics_of(2, "relu"), torch.tensor(0.2, dtype=torch.float64))
    whole = soft_actor_loss(actor, Batch(features, noise=noise), coefficients)[1]["log_prob"]
    alone = [soft_actor_loss(actor, Batch(features[k : k + 1], noise=noise[k : k + 1]), coefficients) for k in range(3)]
    torch.testing.assert_close(whole[:3], torch.cat([metrics["log_prob"] for _, metrics in alone]))
    mean, log_std = actor(features).chunk(2, -1)
    gaussian = torch.distributions.Normal(mean, log_std.exp())
    sample = mean + log_std.exp() * noise
    expected = (
        gaussian.log_prob(sample) - 2.0 * (math.log(2.0) - sample - torch.nn.functional.softplus(-2.0 * sample))
    ).sum(-1)
    assert whole.shape == (ROWS,)
    torch.testing.assert_close(whole, expected)


def test_log_prob_is_finite_at_the_action_bounds():
    """In float32, tanh(u) rounds to 1 for large u, so log(1 - tanh(u)^2) must not be computed directly."""
    actor = Actor(FEATURES, ACTIONS, Layers((8,), "relu", drawn()), stochastic=True)
    actor.head.bias.data = torch.tensor([30.0, -30.0, 80.0, -50.0, 50.0, 0.0])
    distribution = actor.distribution(torch.zeros(1, FEATURES))
    assert distribution.log_std.tolist() == [[LOG_STD[0], LOG_STD[1], 0.0]]
    log_prob = distribution.log_prob(distribution.sample(drawn()))
    assert torch.isfinite(log_prob).all() and log_prob.abs() < 500.0


@pytest.mark.parametrize("rows", [1, 5, 36])
def test_micro_batches_give_the_same_step(rows):
    """With row weights, errors in the order of the rows, in closed form and with autograd."""
    weight = normal(ROWS, seed=4).abs()
    x, action, target = normal(ROWS, FEATURES, seed=1), normal(ROWS, ACTIONS, seed=2), normal(ROWS, seed=3)
    batch = Batch(x, action, target=target, weight=weight)
    moved, reported = [], []
    for micro_batch, kind in ((None, FastLearner), (rows, FastLearner), (rows, Learner)):
        critics = critics_of(2, "relu")
        how = {"max_grad_norm": 1.0, "micro_batch": micro_batch}
        learner = kind(critics, critic_loss, lambda parameters: torch.optim.SGD(parameters, lr=0.1), **how)
        reported.append(learner.step(batch, None))
        moved.append(torch.nn.utils.parameters_to_vector(critics.parameters()).detach())
    for other, metrics in zip(moved[1:], reported[1:], strict=True):
        torch.testing.assert_close(other, moved[0], rtol=1e-10, atol=1e-13)
        torch.testing.assert_close(metrics, reported[0], rtol=1e-10, atol=1e-13)
