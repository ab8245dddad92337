from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from rein.networks.q_networks import QNetwork
from rein.ops.random import generator

B, F, A = 5, 3, 4


def network(seed: int = 0, space: spaces.Space[Any] | None = None, **options: Any) -> QNetwork:
    space = space or spaces.Box(-1.0, 1.0, (F,))
    return QNetwork(space, spaces.Discrete(A), generator(seed, "networks"), **{"hidden": (16, 8), **options})


def features(rows: int = B) -> torch.Tensor:
    return torch.randn(rows, F, generator=generator(0, "features"))


@pytest.mark.parametrize("hidden", [(), (16,), (16, 8)])
@pytest.mark.parametrize("dueling", [False, True])
def test_one_value_per_action(hidden: tuple[int, ...], dueling: bool) -> None:
    assert network(hidden=hidden, dueling=dueling)(features()).shape == (B, A)


def test_hidden_layer_is_linear_norm_relu() -> None:
    it, x = network(), features()
    assert len(it.hidden) == 6
    for layer, kind in zip(it.hidden, [nn.Linear, nn.LayerNorm, nn.ReLU] * 2, strict=True):
        assert isinstance(layer, kind)
    for linear, norm in zip(it.hidden[::3], it.hidden[1::3], strict=True):  # type: ignore[arg-type]  # a Sequential
        z = linear(x)
        centered = z - z.mean(1, keepdim=True)
        expected = centered / (centered.square().mean(1, keepdim=True) + norm.eps).sqrt()
        torch.testing.assert_close(norm(z), expected)
        x = expected.relu()
    torch.testing.assert_close(it.head(x), it(features()))


def test_layer_norm_can_be_disabled() -> None:
    assert not [layer for layer in network(layer_norm=False).modules() if isinstance(layer, nn.LayerNorm)]


def test_dueling_bias_shifts_the_values_of_all_actions() -> None:
    it, x = network(dueling=True), features(1)
    before = it(x)
    with torch.no_grad():
        it.head.linear.bias[0] += 1.0  # type: ignore[union-attr]  # it has a bias
    torch.testing.assert_close(it(x), before + 1.0)


@pytest.mark.parametrize("space", [spaces.Discrete(7), spaces.Dict(a=spaces.MultiDiscrete([2, 3]), b=spaces.Box(0, 1))])
def test_observations_of_every_space_are_accepted(space: spaces.Space[Any]) -> None:
    it = network(space=space)
    samples = [space.sample() for _ in range(B)]
    if isinstance(space, spaces.Dict):
        observation: Any = {key: torch.as_tensor(np.stack([s[key] for s in samples])) for key in space}
    else:
        observation = torch.as_tensor(samples)
    assert it(it.preprocess(observation)).shape == (B, A)


def test_images_go_through_convolutions() -> None:
    it = network(space=spaces.Box(0, 255, (36, 36, 3), np.uint8), hidden=(8,))
    image = torch.randint(256, (2, 36, 36, 3), dtype=torch.uint8, generator=generator(0, "image"))
    value = it(it.preprocess(image))
    assert value.shape == (2, A)
    assert it.encoder is not None
    torch.testing.assert_close(it.head(it.hidden(it.encoder(image))), value)


@pytest.mark.parametrize("space", [spaces.Box(-1.0, 1.0, (2,)), spaces.MultiDiscrete([2, 2])])
def test_non_discrete_actions_are_rejected(space: spaces.Space[Any]) -> None:
    with pytest.raises(ValueError, match=r"requires Discrete actions"):
        QNetwork(spaces.Box(-1.0, 1.0, (F,)), space, generator(0, "networks"))
