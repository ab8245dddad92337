"""Distributions of returns: truncated mixtures and the loss of sorted targets."""

from __future__ import annotations

import pytest
import torch

from rein.ops.losses import quantile_huber
from rein.ops.random import generator
from rein.ops.return_distributions import smallest_quantiles, sorted_quantile_huber


def test_largest_quantiles_of_all_critics_are_dropped() -> None:
    quantile_KBQ = torch.tensor([[[3.0, 1.0, 2.0], [0.0, 0.0, 0.0]], [[9.0, 8.0, 7.0], [1.0, -1.0, 0.0]]])
    assert smallest_quantiles(quantile_KBQ, 1).tolist() == [[1.0, 2.0, 3.0, 7.0], [-1.0, 0.0, 0.0, 0.0]]
    assert smallest_quantiles(quantile_KBQ, 0).shape == (2, 6)


@pytest.mark.parametrize("kappa", [0.3, 1.0])
def test_quantile_loss_of_sorted_targets_and_its_gradient_match_those_of_all_pairs(kappa: float) -> None:
    drawn = generator(0, "quantiles")
    quantile = torch.randn(2, 7, 5, generator=drawn, dtype=torch.float64).requires_grad_()
    target = (3.0 * torch.randn(7, 12, generator=drawn, dtype=torch.float64)).sort(1).values
    target[0] = target[0, 0]  # equal targets
    tau = (torch.arange(5, dtype=torch.float64) + 0.5) / 5
    found, expected = sorted_quantile_huber(quantile, tau, target, kappa), quantile_huber(quantile, tau, target, kappa)
    torch.testing.assert_close(found, expected)
    gradients = [torch.autograd.grad(loss.sum(), quantile)[0] for loss in (found, expected)]
    torch.testing.assert_close(*gradients)
    single = sorted_quantile_huber(1e4 + quantile.float(), tau.float(), 1e4 + target.float(), kappa)
    torch.testing.assert_close(single.double(), expected, atol=2e-3, rtol=1e-3)
