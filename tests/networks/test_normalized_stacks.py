"""Stacks of normalized networks."""

from __future__ import annotations

import copy

import torch

from rein.networks.normalized_stacks import BatchRenormStack, LayerNormStack
from rein.ops.random import generator


def test_layer_norm_precedes_the_activation() -> None:
    stack = LayerNormStack(2, 3, (5, 4), "tanh", generator(0, "stack"))
    with torch.no_grad():
        for parameter in stack.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator(1, "stack", parameter.numel()))
    x = torch.randn(7, 3, generator=generator(0, "x"))
    found = stack(x)
    for k in range(2):
        h = x.double()
        for layer in range(2):
            h = h @ stack.weights[layer][k].double() + stack.biases[layer][k].double()
            h = torch.nn.functional.layer_norm(h, h.shape[1:])
            h = (h * stack.scales[layer][k].double() + stack.shifts[layer][k].double()).tanh()
        torch.testing.assert_close(found[k].double(), h, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(stack.member(k, x), found[k])


def test_running_statistics_follow_batches_in_training_mode_only() -> None:
    stack = BatchRenormStack(2, 3, (4,), "relu", generator(0, "stack"))
    x = 3.0 * torch.randn(500, 3, generator=generator(0, "x")) + 2.0
    stack.eval()
    before = copy.deepcopy(stack.state_dict())
    stack(x)
    assert all(torch.equal(before[name], value) for name, value in stack.state_dict().items())
    stack.train()
    for _ in range(1_000):
        trained = stack(x)
    stack.eval()
    torch.testing.assert_close(stack(x), trained, atol=1e-2, rtol=1e-2)
    assert stack.mean_0.mean().item() > 1.0


def test_corrections_begin_after_the_warm_up() -> None:
    """With corrections, a batch whose statistics differ from the running ones is normalized by the latter."""
    stack = BatchRenormStack(1, 3, (), "relu", generator(0, "stack"))
    x = 1.0 + torch.randn(500, 3, generator=generator(0, "x"))
    assert stack(x).mean().abs() < 1e-4
    stack.batches.fill_(stack.WARM_UP)
    assert stack(x).mean() > 0.9
