"""Stacked networks match separate networks in all execution modes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from rein.accelerate import fused_layers as ops
from rein.networks.mlp import ACTIVATIONS, MLP, Stack
from rein.ops.random import generator

B, I = 9, 5  # noqa: E741  # I inputs
HIDDEN = (8, 6)


def make(members: int = 2, activation: str = "tanh", hidden: tuple[int, ...] = HIDDEN, inputs: int = I) -> Stack:
    return Stack(members, inputs, hidden, activation, generator(0, "networks"))


def rows(*leading: int) -> Tensor:
    return torch.randn(*leading, I, generator=generator(0, "rows"))


def gradients(stack: Stack, x: Tensor) -> list[Tensor]:
    y = stack(x)
    weight = torch.arange(y.numel(), dtype=torch.float32).view_as(y) / y.numel()
    return list(torch.autograd.grad((weight * y.float()).sum(), [*stack.parameters()]))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("members", [1, 2, 3])
def test_each_member_is_a_multilayer_perceptron(activation: str, members: int) -> None:
    stack = make(members, activation)
    x = rows(B)
    y = stack(x)
    assert y.shape == (members, B, HIDDEN[-1]) and stack.features == HIDDEN[-1]
    for k in range(members):
        single = MLP(I, HIDDEN, activation, generator(0, "networks"))
        layers = [layer for layer in single.layers if isinstance(layer, nn.Linear)]
        with torch.no_grad():
            for layer, weight, bias in zip(layers, stack.weights, stack.biases, strict=True):
                layer.weight.copy_(weight[k].t())
                layer.bias.copy_(bias[k, 0])
        torch.testing.assert_close(y[k], single(x), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(y[k], stack.member(k, x), atol=1e-6, rtol=1e-6)


def test_members_are_initially_orthogonal_and_differ() -> None:
    stack = make(2, hidden=(5, 5))
    for weight in stack.weights:
        for member in weight:
            torch.testing.assert_close(member @ member.t(), 2.0 * torch.eye(5), atol=1e-5, rtol=0)
        assert not torch.equal(weight[0], weight[1])
    assert all(not bias.any() for bias in stack.biases)


@pytest.mark.parametrize("leading", [(B,), (2, B)])
def test_members_can_have_separate_inputs(leading: tuple[int, ...]) -> None:
    stack, x = make(), rows(*leading)
    expected = torch.stack([stack.member(k, x if x.ndim == 2 else x[k]) for k in range(2)])
    torch.testing.assert_close(stack(x), expected)


@pytest.mark.parametrize("members", [1, 2])
def test_without_layers_input_is_passed_on(members: int) -> None:
    stack, x = make(members, hidden=()), rows(B)
    assert stack.features == I
    assert torch.equal(stack(x), x.expand(members, B, I))
    assert torch.equal(stack.member(members - 1, x), x)


@pytest.mark.default_cases("relu")
@pytest.mark.parametrize("activation", ops.FUSED)
def test_compiled_stack_matches_to_rounding(activation: str) -> None:
    stack, x = make(activation=activation), rows(B)
    compiled = torch.compile(stack, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), stack(x), atol=1e-6, rtol=1e-5)
    for one, other in zip(gradients(compiled, x), gradients(stack, x), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("activation", ops.FUSED)
def test_autocast_affects_only_products(activation: str) -> None:
    stack, x = make(activation=activation), rows(B)
    exact = stack(x)
    with torch.autocast("cpu", torch.bfloat16):
        rough, rough_gradients = stack(x), gradients(stack, x)
    assert rough.dtype == torch.bfloat16
    torch.testing.assert_close(rough.float(), exact, atol=0.05, rtol=0.05)
    for one, other in zip(rough_gradients, gradients(stack, x), strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one, other, atol=0.1, rtol=0.1)


def test_unknown_activation_is_rejected() -> None:
    with pytest.raises(ValueError, match="activation='sinh': use one of tanh, relu"):
        make(activation="sinh")
