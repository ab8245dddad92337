"""Forward and backward pass of stacked layers against the same layers in autograd.

Shapes: K networks, B rows, I inputs, H features.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from rein.accelerate.fused_layers import FUSED, stack_backward, stack_forward
from rein.ops.random import generator

B, I = 7, 3  # noqa: E741  # I inputs
SIZES = (I, 6, 5, 4)
PLAIN = {"tanh": torch.tanh, "relu": torch.relu}
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5}


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=generator(seed, "numbers"), dtype=torch.float64).to(dtype)


def parameters(members: int, layers: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Return weights and biases in turn, none of them zero."""
    tensors = []
    for layer, (before, after) in enumerate(itertools.pairwise(SIZES[: layers + 1])):
        tensors.append(numbers(members, before, after, seed=10 + layer, dtype=dtype).requires_grad_())
        tensors.append(numbers(members, 1, after, seed=20 + layer, dtype=dtype).requires_grad_())
    return tensors


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
def test_outputs_and_all_gradients_match_autograd(
    activation: str, layers: int, members: int, separate: bool, dtype: torch.dtype
) -> None:
    x = numbers(*((members, B, I) if separate else (B, I)), dtype=dtype).requires_grad_()
    p = parameters(members, layers, dtype)
    expected = plain_stack(x, p, activation)
    weight = numbers(*expected.shape, seed=5, dtype=dtype)
    of_x, *of_parameters = torch.autograd.grad((weight * expected).sum(), [x, *p])
    with torch.no_grad():
        y, way = stack_forward(x, p, activation)
        gradients, of_input = stack_backward(weight, way, of_input=True)
    assert of_input is not None
    found = [y, of_input if separate else of_input.sum(0), *gradients]
    for one, other in zip(found, [expected, of_x, *of_parameters], strict=True):
        torch.testing.assert_close(one, other, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("activation", FUSED)
@torch.no_grad()
def test_each_gradient_is_the_same_without_the_others(activation: str) -> None:
    y, way = stack_forward(numbers(B, I), parameters(2, 2), activation)
    both, of_input = stack_backward(numbers(*y.shape), way, of_input=True)
    alone, nothing = stack_backward(numbers(*y.shape), way)
    none, of_input_alone = stack_backward(numbers(*y.shape), way, of_input=True, of_parameters=False)
    assert nothing is None and none == []
    assert all(torch.equal(one, other) for one, other in zip(both, alone, strict=True))
    assert of_input is not None and of_input_alone is not None and torch.equal(of_input, of_input_alone)


@pytest.mark.parametrize("activation", FUSED)
@torch.no_grad()
def test_inputs_are_not_modified(activation: str) -> None:
    x, p = numbers(B, I), parameters(2, 3)
    before = [tensor.clone() for tensor in (x, *p)]
    y, way = stack_forward(x, p, activation)
    gradient = numbers(*y.shape, seed=5)
    kept = gradient.clone()
    stack_backward(gradient, way, of_input=True)
    assert torch.equal(gradient, kept)
    assert all(torch.equal(one, other) for one, other in zip(before, (x, *p), strict=True))


@pytest.mark.parametrize("activation", FUSED)
@torch.no_grad()
def test_large_inputs_saturate_without_overflow(activation: str) -> None:
    x, p = 1e4 * numbers(B, I, dtype=torch.float32), parameters(2, 3, torch.float32)
    y, way = stack_forward(x, p, activation)
    gradients, of_input = stack_backward(torch.ones_like(y), way, of_input=True)
    assert of_input is not None
    assert all(torch.isfinite(tensor).all() for tensor in (y, of_input, *gradients))
