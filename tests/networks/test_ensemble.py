from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn

from rein.networks.ensemble import Ensemble
from rein.networks.mlp import ACTIVATIONS, MLP, orthogonal_linear
from rein.ops.random import generator

K, B, I, O = 3, 11, 5, 2  # noqa: E741
HIDDEN = (16, 8)


def ensemble(members: int = K, activation: str = "tanh", seed: int = 0, **options: float) -> Ensemble:
    return Ensemble(members, I, HIDDEN, O, activation, generator(seed, "members"), **options)


def separate(activation: str = "tanh", gain: float = 1.0) -> list[nn.Sequential]:
    """What the members of `ensemble` are, each by itself."""
    stream = generator(0, "members")
    members = []
    for _ in range(K):
        body = MLP(I, HIDDEN, activation, stream)
        members.append(nn.Sequential(body, orthogonal_linear(body.features, O, gain, stream)))
    return members


def rows(*leading: int) -> Tensor:
    return torch.randn(*leading, I, generator=generator(0, "rows"))


@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
@pytest.mark.parametrize("leading", [(B,), (K, B)])
def test_it_is_equal_to_separate_networks_and_so_are_its_gradients(activation: str, leading: tuple[int, ...]) -> None:
    together, alone = ensemble(activation=activation), separate(activation)
    x, y = rows(*leading).requires_grad_(), rows(*leading).requires_grad_()
    out = together(x)
    expected = torch.stack([member(y if y.ndim == 2 else y[k]) for k, member in enumerate(alone)])
    assert out.shape == (K, B, O)
    torch.testing.assert_close(out, expected)
    weight = torch.randn(K, B, O, generator=generator(0, "loss"))
    (weight * out.square()).sum().backward()
    (weight * expected.square()).sum().backward()
    torch.testing.assert_close(x.grad, y.grad)
    columns = zip(*(member.parameters() for member in alone), strict=True)
    for mine, theirs in zip(together.parameters(), columns, strict=True):
        assert mine.grad is not None
        gradient = torch.stack([p.grad for p in theirs if p.grad is not None])
        torch.testing.assert_close(mine.grad, gradient.view_as(mine))


@pytest.mark.parametrize("gain", [1.0, 0.01])
def test_members_begin_as_separate_networks_do(gain: float) -> None:
    columns = zip(*(member.parameters() for member in separate(gain=gain)), strict=True)
    for mine, theirs in zip(ensemble(gain=gain).parameters(), columns, strict=True):
        assert torch.equal(mine, torch.stack(theirs).view_as(mine))


def test_the_gain_is_that_of_the_last_layer() -> None:
    first, *_, last = [p for p in ensemble(gain=0.1).parameters() if p.shape[-1] > 1]
    for weight_KOI, gain in ((first, math.sqrt(2.0)), (last, 0.1)):
        for weight in weight_KOI.detach():
            short = weight if len(weight) <= weight.shape[1] else weight.T
            torch.testing.assert_close(short @ short.T, gain**2 * torch.eye(len(short)), atol=1e-5, rtol=0.0)


def test_members_differ_and_learn_apart() -> None:
    it, x = ensemble(), rows(B)
    out = it(x)
    assert not torch.allclose(out[0], out[1])
    out[1].square().sum().backward()
    for p in it.parameters():
        assert p.grad is not None
        assert (p.grad[[0, 2]] == 0.0).all() and (p.grad[1] != 0.0).any()


def test_with_one_output_and_one_row_it_is_equal_too() -> None:
    stream, again = generator(0, "members"), generator(0, "members")
    together = Ensemble(2, I, HIDDEN, 1, "relu", stream)
    alone = []
    for _ in range(2):
        body = MLP(I, HIDDEN, "relu", again)
        alone.append(nn.Sequential(body, orthogonal_linear(body.features, 1, 1.0, again)))
    for x in (rows(1), rows(B)):
        torch.testing.assert_close(together(x), torch.stack([member(x) for member in alone]))


def test_without_hidden_layers_members_are_linear() -> None:
    it, x = Ensemble(K, I, (), O, "relu", generator(0, "members")), rows(B)
    assert len(list(it.parameters())) == 2
    torch.testing.assert_close(it(2.0 * x), 2.0 * it(x))


def test_weights_are_drawn_under_the_generator_alone() -> None:
    before = torch.get_rng_state()
    one, other = ensemble(), ensemble(seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(one(rows(B)), other(rows(B)))


def test_a_copy_is_loaded_with_the_state_of_another_and_says_the_same() -> None:
    one, other = ensemble(), ensemble(seed=1)
    target = copy.deepcopy(other)
    target.load_state_dict(one.state_dict())
    assert torch.equal(target(rows(B)), one(rows(B)))


def test_no_members_and_unknown_activations_are_errors() -> None:
    with pytest.raises(ValueError, match=r"members=0"):
        ensemble(members=0)
    with pytest.raises(ValueError, match=r"activation='swoosh'"):
        ensemble(activation="swoosh")
