from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from rein.ops.losses import (
    categorical_hinge,
    clipped_surrogate,
    clipped_surrogate_slope,
    clipped_value_loss,
    clipped_value_slope,
    expectile,
    huber,
    log_cosh,
    quantile_huber,
)
from rein.ops.random import generator

B = 200
CLIP = 0.2


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=generator(seed, "losses"))


def batch() -> tuple[Tensor, Tensor, Tensor]:
    """Return new and old log-probabilities, with ratios on both sides of the clips, and advantages of both signs."""
    old = -numbers(B, seed=1).abs()
    return old + 0.3 * numbers(B, seed=2), old, numbers(B, seed=3)


def close(result: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(result.double(), expected.double(), rtol=1e-5, atol=1e-6)


def test_clipped_surrogate_matches_its_equation() -> None:
    new, old, advantage = batch()
    result = clipped_surrogate(new, old, advantage, CLIP)
    for row in range(B):
        ratio, weight = math.exp(new[row].item() - old[row].item()), advantage[row].item()
        kept = min(max(ratio, 1.0 - CLIP), 1.0 + CLIP)
        assert result.loss[row].item() == pytest.approx(-min(ratio * weight, kept * weight), rel=1e-4, abs=1e-6)
        assert result.ratio[row].item() == pytest.approx(ratio, rel=1e-5)
        assert result.approx_kl[row].item() == pytest.approx(ratio - 1.0 - math.log(ratio), rel=1e-3, abs=1e-6)
        assert result.clipped[row].item() == (kept != ratio)
    assert 0.0 < result.clipped.mean() < 1.0


def test_surrogate_before_the_first_update_is_the_policy_gradient() -> None:
    _, old, advantage = batch()
    new = old.clone().requires_grad_()
    result = clipped_surrogate(new, old, advantage, CLIP)
    (gradient,) = torch.autograd.grad(result.loss.sum(), new)
    close(gradient, -advantage)
    assert (result.ratio == 1.0).all()
    assert (result.approx_kl == 0.0).all()
    assert (result.clipped == 0.0).all()


def test_slope_of_the_surrogate_is_its_derivative() -> None:
    new, old, advantage = batch()
    (expected,) = torch.autograd.grad(clipped_surrogate(new.requires_grad_(), old, advantage, CLIP).loss.sum(), new)
    assert (expected == 0.0).any()
    close(clipped_surrogate_slope(new, old, advantage, CLIP), expected)
    assert not clipped_surrogate_slope(new, old, advantage, CLIP).requires_grad


def test_other_results_of_the_surrogate_carry_no_gradient() -> None:
    new, old, advantage = batch()
    result = clipped_surrogate(new.requires_grad_(), old, advantage, CLIP)
    assert result.loss.requires_grad
    assert not any(x.requires_grad for x in result[1:])


def test_clipped_value_loss_is_the_larger_of_two_errors() -> None:
    value, old, target = (numbers(B, seed=seed) for seed in (6, 7, 8))
    result = clipped_value_loss(value, old, target, 0.5)
    for row in range(B):
        v, before, y = value[row].item(), old[row].item(), target[row].item()
        kept = before + min(max(v - before, -0.5), 0.5)
        assert result[row].item() == pytest.approx(0.5 * max((v - y) ** 2, (kept - y) ** 2), rel=1e-4, abs=1e-6)
    assert (result >= 0.5 * (value - target).square()).all()
    assert torch.equal(clipped_value_loss(value, old, target, math.inf), 0.5 * (value - target).square())


@pytest.mark.parametrize("clip", [0.0, 0.2, 2.0, math.inf])
def test_clipped_value_slope_matches_autograd(clip: float) -> None:
    value, old, target = (numbers(B, seed=seed).double() for seed in (6, 7, 8))
    value.requires_grad_()
    (expected,) = torch.autograd.grad(clipped_value_loss(value, old, target, clip).sum(), value)
    assert torch.equal(clipped_value_slope(value, old, target, clip), expected)
    assert (expected == 0.0).any() == (clip < math.inf)


def test_huber_without_delta_is_half_the_square() -> None:
    error = torch.tensor([-3.0, 0.0, 0.5, 100.0], dtype=torch.float64)
    assert torch.equal(huber(error, None), error.square() / 2.0)
    assert torch.equal(huber(error, None), huber(error, 100.0))


def test_log_cosh_matches_its_definition_and_is_finite_for_large_errors() -> None:
    error = numbers(B, seed=4)
    close(log_cosh(error), error.double().cosh().log())
    close(log_cosh(torch.tensor([-1e4, 1e4])), torch.tensor(2 * [1e4 - math.log(2.0)]))


def test_categorical_hinge_matches_multi_margin_loss_of_the_highest_other_score() -> None:
    score, target = numbers(B, 4, seed=4), numbers(B, seed=5).gt(0.0).long()
    margins = torch.tensor(
        [
            max(0.0, 1.0 + max(float(s) for i, s in enumerate(row) if i != t) - float(row[t]))
            for row, t in zip(score, target.tolist(), strict=True)
        ]
    )
    close(categorical_hinge(score, target), margins)
    two = numbers(B, 2, seed=6)
    close(categorical_hinge(two, target), 2.0 * F.multi_margin_loss(two, target, reduction="none"))


@pytest.mark.parametrize("delta", [0.1, 1.0, 2.5])
def test_huber_and_its_gradient_match_torch(delta: float) -> None:
    error = torch.cat([2.0 * numbers(B), torch.tensor([0.0, delta, -delta])]).requires_grad_()
    result, expected = huber(error, delta), F.huber_loss(error, torch.zeros_like(error), reduction="none", delta=delta)
    close(result, expected)
    close(torch.autograd.grad(result.sum(), error)[0], error.detach().clamp(-delta, delta))


def test_expectile_of_one_half_is_half_the_squared_error() -> None:
    error = numbers(B)
    close(expectile(error, 0.5), 0.5 * error.square())
    close(expectile(error, 0.8), torch.where(error > 0.0, 0.8, 0.2) * error.square())


@pytest.mark.parametrize("kappa", [0.3, 1.0])
@pytest.mark.parametrize("own_levels", [False, True])
def test_quantile_loss_matches_its_equation(kappa: float, own_levels: bool) -> None:
    rows, quantiles, samples = 3, 4, 5
    quantile, target = numbers(rows, quantiles), numbers(rows, samples, seed=1)
    tau = torch.rand(rows, quantiles, generator=generator(0, "tau")) if own_levels else (torch.arange(4) + 0.5) / 4
    result = quantile_huber(quantile, tau, target, kappa)
    for row in range(rows):
        total = 0.0
        for i in range(quantiles):
            level = (tau[row, i] if own_levels else tau[i]).item()
            for j in range(samples):
                error = target[row, j].item() - quantile[row, i].item()
                size = 0.5 * error**2 if abs(error) <= kappa else kappa * (abs(error) - 0.5 * kappa)
                total += abs(level - (error < 0.0)) * size / kappa / samples
        assert result[row].item() == pytest.approx(total, rel=1e-5)
