"""Distributions of returns: truncated mixtures, the loss of sorted targets, categorical targets and losses."""

from __future__ import annotations

import math

import pytest
import torch

from rein.ops.losses import quantile_huber
from rein.ops.random import generator
from rein.ops.return_distributions import (
    categorical_divergence,
    categorical_target,
    smallest_quantiles,
    sorted_quantile_huber,
)


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


@pytest.mark.parametrize("discounts", [False, True])
def test_categorical_target_matches_the_algorithm_of_the_paper(discounts: bool) -> None:
    drawn = generator(0, "categorical")
    support, rows = torch.linspace(-1.0, 2.0, 7), 20
    prob = torch.rand(rows, 7, generator=drawn).softmax(1)
    reward, u = torch.randn(2, rows, generator=drawn)
    terminated, gamma = u > 0.5, torch.rand(rows, generator=drawn) if discounts else 0.9
    hidden = prob.masked_fill(terminated.unsqueeze(1), torch.nan)
    found = categorical_target(hidden, support, reward, terminated, gamma)
    for row in range(rows):
        expected = [0.0] * 7
        discount = (float(gamma[row]) if discounts else gamma) * (not terminated[row])
        for z, p in zip(support.tolist(), prob[row].double().tolist(), strict=True):
            place = (min(max(float(reward[row]) + discount * z, -1.0), 2.0) + 1.0) / 0.5
            low, high = math.floor(place), math.ceil(place)
            expected[low] += p * (1.0 if low == high else high - place)
            expected[high] += p * (0.0 if low == high else place - low)
        assert found[row].tolist() == pytest.approx(expected, abs=1e-5)


def test_divergence_is_zero_for_equal_probabilities_and_has_the_gradient_of_the_cross_entropy() -> None:
    logit = torch.randn(4, 5, generator=generator(0, "logits"), dtype=torch.float64).requires_grad_()
    target = torch.tensor([[0.0, 0.5, 0.5, 0.0, 0.0]], dtype=torch.float64).expand(4, 5)
    log_prob = logit.log_softmax(1)
    assert categorical_divergence(log_prob.detach(), log_prob.detach().exp()).abs().max() < 1e-12
    entropy = torch.special.entr(target).sum(1)
    cross = -(target * log_prob).sum(1)
    torch.testing.assert_close(categorical_divergence(log_prob, target), cross - entropy)
    (found,) = torch.autograd.grad(categorical_divergence(log_prob, target).sum(), logit, retain_graph=True)
    torch.testing.assert_close(found, torch.autograd.grad(cross.sum(), logit)[0])
