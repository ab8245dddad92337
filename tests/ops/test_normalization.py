"""Batch renormalization."""

from __future__ import annotations

import pytest
import torch

from rein.ops.normalization import batch_renorm
from rein.ops.random import generator


@pytest.mark.parametrize(("r_max", "d_max"), [(3.0, 5.0), (1.1, 0.2), (1.0, 0.0)])
def test_batch_renorm_matches_its_equation(r_max: float, d_max: float) -> None:
    drawn = generator(0, "renorm")
    x = 2.0 * torch.randn(2, 30, 4, generator=drawn) + 1.0
    mean, variance = torch.randn(2, 1, 4, generator=drawn), 5.0 * torch.rand(2, 1, 4, generator=drawn)
    result = batch_renorm(x, mean, variance, r_max=r_max, d_max=d_max)
    exact = x.double()
    m, v = exact.mean(1, keepdim=True), exact.var(1, correction=0, keepdim=True)
    s, running = (v + 1e-3).sqrt(), (variance.double() + 1e-3).sqrt()
    r, d = (s / running).clamp(1.0 / r_max, r_max), ((m - mean) / running).clamp(-d_max, d_max)
    torch.testing.assert_close(result.output.double(), (exact - m) / s * r + d, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close((result.mean.double(), result.variance.double()), (m, v), rtol=1e-5, atol=1e-6)
    free = batch_renorm(x, mean, variance, r_max=1e9, d_max=1e9)
    torch.testing.assert_close(free.output, (x - mean) / running.float(), rtol=1e-3, atol=1e-4)


def test_corrections_of_batch_renorm_carry_no_gradient() -> None:
    x = torch.randn(1, 9, 3, generator=generator(0, "renorm"), dtype=torch.float64).requires_grad_()
    mean, variance = torch.full((1, 1, 3), 0.3, dtype=torch.float64), torch.full((1, 1, 3), 2.0, dtype=torch.float64)
    weight = torch.arange(27.0, dtype=torch.float64).view(1, 9, 3)
    (found,) = torch.autograd.grad((batch_renorm(x, mean, variance, r_max=3.0, d_max=5.0).output * weight).sum(), x)
    deviation = (x.var(1, correction=0, keepdim=True) + 1e-3).sqrt()
    r = (deviation / (variance + 1e-3).sqrt()).detach()
    (expected,) = torch.autograd.grad(((x - x.mean(1, keepdim=True)) / deviation * r * weight).sum(), x)
    torch.testing.assert_close(found, expected)
