from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gymnasium import spaces

from rein.networks.q_networks import OnlineAndTarget, QuantileNetwork, even_levels
from rein.ops.random import generator

B, NUMBERS, A = 5, 3, 4


def network(space: spaces.Space[Any] | None = None, **options: Any) -> QuantileNetwork:
    space = space or spaces.Box(-1.0, 1.0, (NUMBERS,))
    return QuantileNetwork(space, spaces.Discrete(A), generator(0, "networks"), **{"hidden": (16, 8), **options})


def features(rows: int = B) -> torch.Tensor:
    return torch.randn(rows, NUMBERS, generator=generator(0, "features"))


@pytest.mark.parametrize("hidden", [(), (16,), (16, 8)])
def test_one_quantile_per_level_and_action(hidden):
    it, level = network(hidden=hidden), torch.rand(B, 6, generator=generator(0, "levels"))
    assert it.quantiles(features(), level).shape == (B, 6, A)
    assert it(features()).shape == (B, A)


@pytest.mark.parametrize("activation", ["relu", "tanh"])
def test_network_matches_the_equation_of_the_paper(activation):
    it, x, tau = network(activation=activation, cosines=7), features()[0], 0.3
    act = {"relu": F.relu, "tanh": torch.tanh}[activation]
    cosines = torch.tensor([math.cos(math.pi * i * tau) for i in range(7)])
    phi = F.relu(it.embedding.weight @ cosines + it.embedding.bias)
    psi = act(x @ it.before.weights[0][0] + it.before.biases[0][0, 0])
    top = act((psi * phi) @ it.after.weights[0][0] + it.after.biases[0][0, 0])
    expected = it.head.weight @ top + it.head.bias
    assert torch.allclose(it.quantiles(x[None], torch.tensor([[tau]]))[0, 0], expected, atol=1e-5)


def test_levels_and_rows_are_independent():
    it, level = network(), torch.rand(B, 6, generator=generator(0, "levels"))
    alone = it.quantiles(features()[2:3], level[2:3, 4:5])
    assert torch.allclose(it.quantiles(features(), level)[2, 4], alone[0, 0], atol=1e-6)


@pytest.mark.parametrize("risk", [1.0, 0.25])
def test_values_are_means_over_even_levels_up_to_the_risk(risk):
    it = network(action_quantiles=4, risk=risk)
    level = torch.tensor([[0.125, 0.375, 0.625, 0.875]]) * risk
    assert torch.allclose(it(features()), it.quantiles(features(), level.expand(B, -1)).mean(1), atol=1e-6)
    assert not torch.allclose(it(features()), it.quantiles(features(), 0.9 * level.expand(B, -1)).mean(1), atol=1e-6)


def test_even_levels_are_midpoints_and_a_single_one_is_the_median():
    assert even_levels(1).tolist() == [0.5]
    edges = torch.linspace(0.0, 1.0, 9)
    assert torch.allclose(even_levels(8), (edges[1:] + edges[:-1]) / 2)


def test_images_go_through_convolutions_before_the_level_embedding():
    it = network(spaces.Box(0, 255, (4, 84, 84), "uint8"), hidden=())
    image = torch.randint(255, (2, 4, 84, 84), dtype=torch.uint8, generator=generator(0, "image"))
    level = torch.tensor([[0.2, 0.9]] * 2)
    phi = F.relu(it.embedding((level[..., None] * torch.arange(64) * math.pi).cos()))
    expected = it.head(it.encoder(image)[:, None] * phi)
    assert torch.allclose(it.quantiles(image, level), expected, atol=1e-5)


def test_target_is_a_copy_without_a_gradient():
    space = spaces.Box(-1.0, 1.0, (NUMBERS,))
    networks = OnlineAndTarget(QuantileNetwork(space, spaces.Discrete(A), generator(0, "networks"), hidden=(8,)))
    assert torch.equal(networks.online(features()), networks.target(features()))
    assert all(p.requires_grad for p in networks.online.parameters())
    assert not any(p.requires_grad for p in networks.target.parameters())
    online, target = ({p.data_ptr() for p in it.parameters()} for it in (networks.online, networks.target))
    assert not online & target
