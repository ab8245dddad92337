from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rein.networks.q_networks import DuelingHead
from rein.ops.random import generator

B, H, A = 7, 12, 4


def head(seed: int = 0) -> DuelingHead:
    return DuelingHead(H, A, generator(seed, "head"))


def features(*leading: int) -> Tensor:
    return torch.randn(*leading, H, generator=generator(0, "features"))


def parts(head: DuelingHead, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return V and A."""
    weight, bias = head.linear.weight, head.linear.bias
    return x @ weight[0] + bias[0], x @ weight[1:].T + bias[1:]


def test_mean_is_the_value_and_differences_are_those_of_advantages() -> None:
    x, it = features(B), head()
    torch.nn.init.normal_(it.linear.bias, generator=generator(0, "bias"))
    value, advantage = parts(it, x)
    q = it(x)
    assert q.shape == (B, A)
    torch.testing.assert_close(q.mean(-1), value)
    torch.testing.assert_close(q - q[:, :1], advantage - advantage[:, :1])


def test_value_of_a_single_action_is_the_state_value() -> None:
    x, single = features(B), DuelingHead(H, 1, generator(0, "head"))
    torch.testing.assert_close(single(x)[:, 0], parts(single, x)[0])


@pytest.mark.parametrize("leading", [(), (2, 3)])
def test_leading_dimensions_are_kept(leading: tuple[int, ...]) -> None:
    x, it = features(*leading), head()
    torch.testing.assert_close(it(x), it(x.reshape(-1, H)).view(*leading, A))


def test_weights_are_orthogonal_and_drawn_only_from_the_generator() -> None:
    before = torch.get_rng_state()
    one, same, other = head(), head(), head(1)
    assert torch.equal(torch.get_rng_state(), before)
    weight = one.linear.weight.detach()
    torch.testing.assert_close(weight @ weight.T, torch.eye(1 + A), atol=1e-5, rtol=0.0)
    assert (one.linear.bias == 0.0).all()
    assert torch.equal(weight, same.linear.weight)
    assert not torch.equal(weight, other.linear.weight)
