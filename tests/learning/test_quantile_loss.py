from __future__ import annotations

import pytest
import torch
from gymnasium import spaces

from rein.agents.base.learner import Batch
from rein.agents.iqn import quantile_loss
from rein.networks.q_networks import QuantileNetwork
from rein.ops.random import generator

B, Q, S, NUMBERS, A = 6, 4, 3, 2, 3


def network() -> QuantileNetwork:
    drawn = generator(0, "networks")
    return QuantileNetwork(spaces.Box(-1.0, 1.0, (NUMBERS,)), spaces.Discrete(A), drawn, hidden=(8,), cosines=5)


def batch(weight: bool = True) -> Batch:
    drawn = generator(0, "batch")
    numbers = [torch.rand(size, generator=drawn) for size in ((B, NUMBERS), (B, Q), (B, S), (B,))]
    action = torch.randint(A, (B,), generator=drawn)
    weight_B = numbers[3] if weight else None
    return Batch(numbers[0], action, level=numbers[1], target=3.0 * numbers[2] - 1.5, weight=weight_B)


@pytest.mark.parametrize("weight", [False, True])
@pytest.mark.parametrize("kappa", [0.3, 1.0])
def test_loss_matches_the_equation_of_the_paper(kappa, weight):
    net, rows, total = network(), batch(weight), 0.0
    for b in range(B):
        for i in range(Q):
            tau, z = rows.level[b, i], net.quantiles(rows.features, rows.level)[b, i, rows.action[b]]
            for j in range(S):
                delta = rows.target[b, j] - z
                huber = 0.5 * delta**2 if delta.abs() <= kappa else kappa * (delta.abs() - 0.5 * kappa)
                pair = (tau - (1.0 if delta < 0 else 0.0)).abs() * huber / kappa / S
                total = total + pair * (1.0 if rows.weight is None else rows.weight[b])
    loss, metrics = quantile_loss(net, rows, kappa)
    assert torch.allclose(loss, total / B, atol=1e-6)
    assert metrics["value_loss"] == loss.detach()


def test_td_error_is_unweighted():
    net, rows = network(), batch()
    _, metrics = quantile_loss(net, rows, 1.0, report=False)
    assert metrics.keys() == {"td_error"}
    for b in range(B):
        z = net.quantiles(rows.features, rows.level)[b, :, rows.action[b]]
        assert torch.allclose(metrics["td_error"][b], (rows.target[b][:, None] - z).abs().mean(), atol=1e-6)
    assert not metrics["td_error"].requires_grad
