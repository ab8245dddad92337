"""The fused layers against the same layers in plain autograd.

Shapes: K networks, B rows, I inputs, H features.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from rein.ops.random import generator
from rein.ops.stack import FUSED, fused_stack

B, I = 7, 3  # noqa: E741  # I inputs
SIZES = (I, 6, 5, 4)
PLAIN = {"tanh": torch.tanh, "relu": torch.relu}
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5}


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=generator(seed, "numbers"), dtype=torch.float64).to(dtype)


def parameters(members: int, layers: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Weights and biases in turn, none of them zero."""
    made = []
    for layer, (before, after) in enumerate(itertools.pairwise(SIZES[: layers + 1])):
        made.append(numbers(members, before, after, seed=10 + layer, dtype=dtype).requires_grad_())
        made.append(numbers(members, 1, after, seed=20 + layer, dtype=dtype).requires_grad_())
    return made


def plain_stack(x: Tensor, weights_and_biases: list[Tensor], activation: str) -> Tensor:
    y = x.expand(len(weights_and_biases[0]), *x.shape[-2:])
    for weight, bias in zip(weights_and_biases[::2], weights_and_biases[1::2], strict=True):
        y = PLAIN[activation](y @ weight + bias)
    return y


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("members", [1, 2, 5])
@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("activation", FUSED)
def test_outputs_and_all_gradients_are_those_of_autograd(
    activation: str, layers: int, members: int, separate: bool, dtype: torch.dtype
) -> None:
    x = numbers(*((members, B, I) if separate else (B, I)), dtype=dtype).requires_grad_()
    p = parameters(members, layers, dtype)
    mine, expected = (f(x, p, activation) for f in (fused_stack, plain_stack))
    close: dict[str, Any] = {"atol": TOLERANCE[dtype], "rtol": TOLERANCE[dtype]}
    torch.testing.assert_close(mine, expected, **close)
    weight = numbers(*expected.shape, seed=5, dtype=dtype)
    gradients = (torch.autograd.grad((weight * y).sum(), [x, *p]) for y in (mine, expected))
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, **close)


@pytest.mark.parametrize("activation", FUSED)
def test_inputs_without_a_gradient_leave_those_of_the_parameters_as_they_are(activation: str) -> None:
    p, x = parameters(2, 2), numbers(B, I)
    with_x = torch.autograd.grad(fused_stack(x.clone().requires_grad_(), p, activation).sum(), p)
    without = torch.autograd.grad(fused_stack(x, p, activation).sum(), p)
    assert all(torch.equal(one, other) for one, other in zip(with_x, without, strict=True))


@pytest.mark.parametrize("activation", FUSED)
def test_nothing_that_is_handed_in_is_changed(activation: str) -> None:
    x, p = numbers(B, I).requires_grad_(), parameters(2, 3)
    before = [tensor.detach().clone() for tensor in (x, *p)]
    y = fused_stack(x, p, activation)
    gradient = numbers(*y.shape, seed=5)
    kept = gradient.clone()
    y.backward(gradient)
    assert torch.equal(gradient, kept)
    assert all(torch.equal(one, other) for one, other in zip(before, (x, *p), strict=True))


@pytest.mark.parametrize("activation", FUSED)
@pytest.mark.parametrize("learns", [False, True])
def test_what_is_not_used_any_more_is_freed_at_once(activation: str, learns: bool) -> None:
    """A graph that holds its own result would keep every batch of a run in memory."""
    x, p = numbers(B, I), parameters(2, 2)
    y = fused_stack(x, p, activation)
    alive = weakref.ref(y)
    if learns:
        torch.autograd.grad(y.sum(), p)
    del y
    assert alive() is None


@pytest.mark.parametrize("activation", FUSED)
def test_a_gradient_may_be_asked_for_twice_where_the_graph_is_kept(activation: str) -> None:
    p = parameters(2, 2)
    y = fused_stack(numbers(B, I), p, activation).square().sum()
    once, again = (torch.autograd.grad(y, p, retain_graph=True) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(once, again, strict=True))


@pytest.mark.parametrize("activation", FUSED)
def test_a_gradient_of_a_gradient_is_an_error_that_says_so(activation: str) -> None:
    x, p = numbers(B, I).requires_grad_(), parameters(2, 2)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(fused_stack(x, p, activation).square().sum(), x, create_graph=True)


@pytest.mark.parametrize("activation", FUSED)
def test_large_inputs_saturate_without_overflow(activation: str) -> None:
    x, p = (1e4 * numbers(B, I, dtype=torch.float32)).requires_grad_(), parameters(2, 3, torch.float32)
    y = fused_stack(x, p, activation)
    gradients = torch.autograd.grad(y.sum(), [x, *p])
    assert all(torch.isfinite(tensor).all() for tensor in (y, *gradients))
