"""Rainbow: noisy layers, and target probabilities."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gymnasium import spaces

import rein
from rein.networks.noisy import NoisyLinear
from rein.ops.random import generator
from rein.types import Transition

SPACES = spaces.Box(-1.0, 1.0, (3,)), spaces.Discrete(4, start=2)
SMALL = {"hidden": (16,), "atoms": 5, "batch_size": 16, "capacity": 300, "learning_starts": 0, "seed": 0}


def filled(**options: Any) -> rein.Rainbow:
    """Return an agent with recorded rows whose target network differs from the online network."""
    agent, drawn = rein.Rainbow(*SPACES, **{**SMALL, **options}), generator(0, "rows")
    for _ in range(10):
        observation, after = torch.rand(2, 4, 3, generator=drawn)
        reward, u = torch.rand(2, 4, generator=drawn)
        action, valid = torch.randint(2, 6, (4,), generator=drawn), torch.ones(4, dtype=torch.bool)
        agent.record_observation(Transition(observation, action, reward, u < 0.3, ~valid, after, valid, {}))
    with torch.no_grad():
        means = (p for name, p in agent.networks.online.named_parameters() if not name.endswith("_std"))
        for parameter in means:
            parameter += 0.5 * torch.randn(parameter.shape, generator=drawn)
    return agent


def test_noisy_layer_matches_its_equation() -> None:
    layer = NoisyLinear(3, 2, 0.5, generator(0, "layer"))
    x, noise = torch.randn(4, 3, generator=generator(0, "x")), torch.randn(5, generator=generator(0, "noise"))
    factor = (noise.sign() * noise.abs().sqrt()).double()
    weight = layer.weight.double() + 0.5 / 3**0.5 * factor[3:, None] * factor[:3]
    expected = x.double() @ weight.T + layer.bias.double() + 0.5 / 3**0.5 * factor[3:]
    torch.testing.assert_close(layer(x, noise).double(), expected, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(layer(x), layer(x, torch.zeros(5)))


def test_only_exploring_actions_are_noisy() -> None:
    agent = filled(noise_std=5.0)
    x = torch.rand(200, 3, generator=generator(0, "x"))
    assert torch.equal(agent.act(x, False), agent.act(x, False))
    assert not torch.equal(agent.act(x, True), agent.act(x, True))
    assert torch.equal(agent.act(x, 0.0), agent.act(x, False))


@pytest.mark.parametrize("double", [False, True])
def test_target_is_the_distribution_of_the_best_next_action(double: bool) -> None:
    agent = filled(double=double, n_step=1, gamma=0.5, noise_std=0.0, value_min=-1.0, value_max=3.0)
    sample, _ = agent.sample()
    online, target = agent.networks.online, agent.networks.target
    batch, after = agent.batch(sample), sample.next_observation
    assert torch.equal(batch.action, sample.action - 2)
    with torch.no_grad():
        best = (online if double else target)(after).argmax(1)
        assert not torch.equal(online(after).argmax(1), target(after).argmax(1))
        value = target(after)[torch.arange(16), best]
    torch.testing.assert_close(batch.target.sum(1), torch.ones(16))
    expected = sample.reward + torch.where(sample.terminated, 0.0, 0.5 * value)  # all returns are within the bounds
    torch.testing.assert_close((batch.target * online.support).sum(1), expected)


def test_bounds_must_be_ordered() -> None:
    with pytest.raises(ValueError, match="value_min"):
        rein.Rainbow(*SPACES, value_min=3.0, value_max=1.0)
