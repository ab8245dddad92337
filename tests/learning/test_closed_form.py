"""The closed-form policy gradient matches autograd."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from gymnasium import spaces

from rein.accelerate.closed_form import has_closed_form, policy_gradient
from rein.agents.base.learner import Batch
from rein.agents.base.on_policy import Coefficients, policy_loss
from rein.networks.actor_critic import ActorCritic
from rein.networks.recurrent import LSTM

FEATURES, ROWS = 5, 37
DISCRETE, BOX = spaces.Discrete(3), spaces.Box(-1.0, 1.0, (2,))
OBSERVATION = spaces.Box(-1.0, 1.0, (FEATURES,))


class CustomEncoder(torch.nn.Linear):
    features = FEATURES

    def __init__(self, *given):
        super().__init__(FEATURES, FEATURES)


def networks_of(action_space, dtype=torch.float64, **shape) -> ActorCritic:
    made = ActorCritic(OBSERVATION, action_space, torch.Generator().manual_seed(0), **{"hidden": (16, 8), **shape})
    head: Any = made.policy_head
    with torch.no_grad():  # enlarge the small initial weights of the head, so that all parts of the gradient matter
        head.linear.weight.mul_(50.0)
    return made.to(dtype)


def batch_of(networks, masked, dtype=torch.float64) -> Batch:
    drawn = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, FEATURES, generator=drawn, dtype=dtype)
    with torch.no_grad():
        distribution, value = networks(x)
        sample = distribution.sample(drawn)
        moved = distribution.log_prob(sample) + 0.3 * torch.randn(ROWS, generator=drawn, dtype=dtype)
    advantage, target = torch.randn(2, ROWS, generator=drawn, dtype=dtype)
    valid = torch.rand(ROWS, generator=drawn) < 0.7 if masked else None
    return Batch(x, sample=sample, log_prob=moved, value=value, advantage=advantage, target=target, valid=valid)


def both(networks, batch, coefficients, share=None):
    loss, metrics = policy_loss(networks, batch, coefficients)
    scale = 1.0 if share is None else share
    autograd = torch.autograd.grad(loss * scale, [*networks.parameters()])
    found = policy_gradient(networks, batch, coefficients, share, report=True)
    assert found is not None
    return (autograd, {name: value * scale for name, value in metrics.items()}), found


@pytest.mark.parametrize("masked", [False, True], ids=["all rows", "some rows"])
@pytest.mark.parametrize("entropy", [0.0, 0.01])
@pytest.mark.parametrize("clip", [0.2, None], ids=["clipped", "plain"])
@pytest.mark.parametrize("activation", ["tanh", "relu"])
@pytest.mark.parametrize("shared", [False, True], ids=["separate", "shared"])
@pytest.mark.parametrize("space", [DISCRETE, BOX], ids=["discrete", "continuous"])
def test_gradient_matches_autograd(space, shared, activation, clip, entropy, masked):
    networks = networks_of(space, shared=shared, activation=activation)
    batch = batch_of(networks, masked)
    (expected, metrics), (found, reported) = both(networks, batch, Coefficients(clip, 0.5, entropy), share=0.25)
    names = [name for name, _ in networks.named_parameters()]
    assert len(found) == len(names)
    for name, one, other in zip(names, expected, found, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-10, atol=1e-14, msg=lambda text, name=name: f"{name}: {text}")
    assert reported == metrics


def test_squashed_policy_matches_autograd():
    networks = networks_of(BOX, squash=True)
    (expected, _), (found, _) = both(networks, batch_of(networks, masked=True), Coefficients(0.2, 0.5, 0.0))
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("shared", [False, True], ids=["separate", "shared"])
@pytest.mark.parametrize("value_clip", [0.05, 0.5, 100.0])
def test_clipped_values_match_autograd_and_the_formula(value_clip, shared):
    networks = networks_of(DISCRETE, shared=shared)
    batch = batch_of(networks, masked=False)
    moved = 0.3 * torch.randn(ROWS, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    batch = batch._replace(value=batch.value + moved)
    coefficients = Coefficients(0.2, 0.5, 0.01, value_clip)
    (expected, metrics), (found, reported) = both(networks, batch, coefficients)
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-10, atol=1e-14)
    assert reported == metrics

    _, value = networks(batch.features)
    clipped = batch.value + torch.clamp(value - batch.value, -value_clip, value_clip)
    loss = 0.5 * torch.max((value - batch.target) ** 2, (clipped - batch.target) ** 2).mean()
    assert metrics["value_loss"].item() == pytest.approx(loss.item(), rel=1e-6)
    (slope,) = torch.autograd.grad(0.5 * loss, networks.value_head.bias)
    torch.testing.assert_close(found[-1], slope, rtol=1e-10, atol=1e-14)


def test_entropy_of_a_squashed_policy_returns_none():
    networks = networks_of(BOX, squash=True)
    coefficients = Coefficients(0.2, 0.5, 0.01)
    assert policy_gradient(networks, batch_of(networks, False), coefficients, None, report=False) is None


@pytest.mark.parametrize(
    ("space", "shape"),
    [
        (spaces.MultiDiscrete([2, 3]), {}),
        (BOX, {"state_dependent_std": True}),
        (DISCRETE, {"activation": "gelu"}),
        (DISCRETE, {"hidden": ()}),
        (DISCRETE, {"core": functools.partial(LSTM, features=8)}),
        (DISCRETE, {"encoder": CustomEncoder}),
    ],
    ids=[
        "several actions",
        "state-dependent standard deviation",
        "another activation",
        "no layers",
        "recurrent",
        "an encoder",
    ],
)
def test_unsupported_networks_have_no_closed_form(space, shape):
    assert not has_closed_form(networks_of(space, **shape))
    assert has_closed_form(networks_of(DISCRETE))
