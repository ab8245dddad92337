"""The scores of distributions match autograd."""

from __future__ import annotations

import torch
from torch import Tensor

from rein.accelerate.closed_form import categorical_score, normal_score
from rein.ops.distributions import Categorical, Normal
from rein.ops.random import generator

N, A = 11, 4


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=generator(seed, "scores"), dtype=torch.float64)


WEIGHT, ENTROPY_WEIGHT = numbers(N, seed=1), numbers(N, seed=2)


def close(result: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(result, expected, rtol=1e-10, atol=1e-12)


def test_categorical_score_matches_autograd() -> None:
    logits = numbers(N, A, seed=3).requires_grad_()
    categorical = Categorical.from_logits(logits)
    sample = torch.arange(N) % A
    weighted_log_prob, weighted_entropy = WEIGHT * categorical.log_prob(sample), ENTROPY_WEIGHT * categorical.entropy()
    (expected,) = torch.autograd.grad(weighted_log_prob.sum(), logits, retain_graph=True)
    close(categorical_score(categorical.log_probs.detach(), sample, WEIGHT), expected)
    (expected,) = torch.autograd.grad((weighted_log_prob + weighted_entropy).sum(), logits)
    close(categorical_score(categorical.log_probs.detach(), sample, WEIGHT, ENTROPY_WEIGHT), expected)


def test_categorical_score_sums_to_zero() -> None:
    categorical = Categorical.from_logits(numbers(N, A, seed=3))
    score = categorical_score(categorical.log_probs, torch.arange(N) % A, WEIGHT, ENTROPY_WEIGHT)
    close(score.sum(-1), torch.zeros(N, dtype=torch.float64))


def test_normal_score_matches_autograd() -> None:
    mean, log_std = numbers(N, A, seed=4).requires_grad_(), numbers(A, seed=5).requires_grad_()
    normal, sample = Normal(mean, log_std), numbers(N, A, seed=6)
    total = (WEIGHT * normal.log_prob(sample) + ENTROPY_WEIGHT * normal.entropy()).sum()
    mean_gradient, log_std_gradient = torch.autograd.grad(total, [mean, log_std])
    mean_score, log_std_score = normal_score(mean.detach(), log_std.detach(), sample, WEIGHT, ENTROPY_WEIGHT)
    close(mean_score, mean_gradient)
    close(log_std_score.sum(0), log_std_gradient)
    without = normal_score(mean.detach(), log_std.detach(), sample, WEIGHT)[1]
    close(log_std_score - without, ENTROPY_WEIGHT.unsqueeze(-1).expand(N, A))
