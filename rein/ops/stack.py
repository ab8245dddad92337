"""Several multilayer perceptrons of one shape, evaluated as one: small networks gain by the number of operations.

Shapes: K networks, B rows, I inputs, H features of a layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

FUSED = ("tanh", "relu")  # the activations there is a backward pass for


class Pass(NamedTuple):
    """What the way back needs of the way there."""

    below: list[Tensor]  # what went into each layer, (K, B, I)
    kept: list[Tensor]  # what came out of each, for tanh (1 + tanh) / 2; (K, B, H)
    weights: list[Tensor]  # (K, I, H) as they were multiplied with: for tanh 2 W in the first layer, 4 W in the others
    activation: str


def fused_stack(x_BI: Tensor, parameters: Sequence[Tensor], activation: str) -> Tensor:
    """x -> act(x W + b) for every layer of every network; (B, I) or (K, B, I) -> (K, B, H).

    `parameters` are the weights (K, I, H) and biases (K, 1, H) of the layers in turn. As autograd would do it, with a
    third of its operations: activations in place, both directions in the fewest products. A gradient of a gradient is
    an error.
    """
    return _FusedStack.apply(x_BI, activation, *parameters)


def stack_forward(x_BI: Tensor, parameters: Sequence[Tensor], activation: str) -> tuple[Tensor, Pass]:
    """What `fused_stack` returns, and what `stack_backward` needs.

        tanh z = 2 s - 1,  s = sigmoid(2 z):   2 z_l = s_l-1 (4 W_l) + 2 (b_l - 1 W_l)

    so that between layers nothing remains to be done but the sigmoid, which is exact to 2e-7 and on the CPU takes a
    fifth of the time of tanh.
    """
    way = Pass([], [], [], activation)
    h = x_BI.expand(len(parameters[0]), *x_BI.shape[-2:])
    for weight, bias in zip(parameters[::2], parameters[1::2], strict=True):
        way.below.append(h)
        if activation == "relu":
            h = torch.baddbmm(bias, h, weight).relu_()
        else:
            shift = (bias - weight.sum(1, keepdim=True)).mul_(2.0) if way.kept else bias * 2.0
            weight = weight * (4.0 if way.kept else 2.0)
            h = torch.baddbmm(shift, h, weight).sigmoid_()
        way.kept.append(h)
        way.weights.append(weight)
    return h if activation == "relu" else h.mul(2.0).sub_(1.0), way


def stack_backward(
    g_KBH: Tensor, way: Pass, *, of_input: bool = False, of_parameters: bool = True
) -> tuple[list[Tensor], Tensor | None]:
    """From the gradient of the result, those of the parameters, in their order, and (K, B, I) of the input if asked.

    Without `of_parameters` there are none of these, and half of the products are spared.
    """
    g, gradients = g_KBH, []
    relu = way.activation == "relu"
    derivative = relu_backward if relu else torch.ops.aten.sigmoid_backward
    for layer in range(len(way.kept) - 1, -1, -1):
        d = derivative(g, way.kept[layer])  # for tanh a quarter of the gradient of z
        if of_parameters:
            of_weight, of_bias = torch.bmm(way.below[layer].transpose(1, 2), d), d.sum(1, keepdim=True)
            if not relu:
                of_bias.mul_(4.0)
                of_weight = of_weight.mul_(8.0).sub_(of_bias) if layer else of_weight.mul_(4.0)
            gradients[:0] = [of_weight, of_bias]
        if layer or of_input:
            g = torch.bmm(d, way.weights[layer].transpose(1, 2))
    return gradients, (g if relu else g.mul_(2.0)) if of_input else None


def relu_backward(g: Tensor, kept: Tensor) -> Tensor:
    """From the gradient of what a ReLU puts out, and that itself, to the gradient of what went in."""
    return torch.ops.aten.threshold_backward(g, kept, 0)


class _FusedStack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, activation: str, *parameters: Tensor) -> Tensor:
        result, way = stack_forward(x, parameters, activation)
        # saved by torch, which knows the result among them: kept by ctx itself, they would never be freed
        ctx.save_for_backward(*way.below, *way.kept, *way.weights)
        ctx.activation, ctx.shared = activation, x.ndim == 2
        return result

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]  # torch declares `*grads`
        if torch.is_grad_enabled():
            raise RuntimeError("a stack of layers has no second derivative: use an activation that is not fused")
        layers = len(ctx.saved_tensors) // 3
        below, kept, weights = (list(ctx.saved_tensors[k * layers : (k + 1) * layers]) for k in range(3))
        way = Pass(below, kept, weights, ctx.activation)
        wanted = any(ctx.needs_input_grad[2:])
        gradients, of_x = stack_backward(g, way, of_input=ctx.needs_input_grad[0], of_parameters=wanted)
        if of_x is not None and ctx.shared:  # of an input that all networks share: the sum of theirs
            of_x = of_x.sum(0)
        return of_x, None, *(gradients or [None] * (2 * layers))


def linear_value(h_KBH: Tensor, weight_K1H: Tensor, bias_K1: Tensor) -> Tensor:
    """One number for each row by each network, h w + b: (K, B).

    As autograd would do it, but that the gradient of h has its rows in order, which whatever is below needs: torch's
    own is transposed, and takes 30 times as long to go on from.
    """
    return _LinearValue.apply(h_KBH, weight_K1H, bias_K1)


class _LinearValue(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(h, weight)
        # rows are columns here: a product with one output is then several times as fast as the other way round
        return torch.baddbmm(bias.unsqueeze(-1), weight, h.mT).squeeze(1)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]  # torch declares `*grads`
        h, weight = ctx.saved_tensors
        of_h = g.unsqueeze(-1) * weight if ctx.needs_input_grad[0] else None
        if not any(ctx.needs_input_grad[1:]):
            return of_h, None, None
        # under autocast g has a type of its own, and h, where it is the input, that of the input
        return of_h, torch.bmm(g.unsqueeze(1), h.to(g.dtype)), g.sum(1, keepdim=True)
