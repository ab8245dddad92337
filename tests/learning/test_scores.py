"""The scores are the gradients that autograd finds."""

from __future__ import annotations

import torch
from torch import Tensor

from rein.agents.base.closed_form import categorical_score, normal_score
from rein.ops.distributions import Categorical, Normal
from rein.ops.random import generator

N, A = 11, 4


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=generator(seed, "scores"), dtype=torch.float64)


WEIGHT, ENTROPY_WEIGHT = numbers(N, seed=1), numbers(N, seed=2)


def close(result: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(result, expected, rtol=1e-10, atol=1e-12)


def test_of_the_logits_of_a_categorical() -> None:
    logits = numbers(N, A, seed=3).requires_grad_()
    categorical = Categorical.from_logits(logits)
    sample = torch.arange(N) % A
    of_log_prob, of_entropy = WEIGHT * categorical.log_prob(sample), ENTROPY_WEIGHT * categorical.entropy()
    (expected,) = torch.autograd.grad(of_log_prob.sum(), logits, retain_graph=True)
    close(categorical_score(categorical.log_probs.detach(), sample, WEIGHT), expected)
    (expected,) = torch.autograd.grad((of_log_prob + of_entropy).sum(), logits)
    close(categorical_score(categorical.log_probs.detach(), sample, WEIGHT, ENTROPY_WEIGHT), expected)


def test_moving_all_logits_alike_changes_nothing() -> None:
    categorical = Categorical.from_logits(numbers(N, A, seed=3))
    score = categorical_score(categorical.log_probs, torch.arange(N) % A, WEIGHT, ENTROPY_WEIGHT)
    close(score.sum(-1), torch.zeros(N, dtype=torch.float64))


def test_of_the_mean_and_the_deviation_of_a_normal() -> None:
    mean, log_std = numbers(N, A, seed=4).requires_grad_(), numbers(A, seed=5).requires_grad_()
    normal, sample = Normal(mean, log_std), numbers(N, A, seed=6)
    total = (WEIGHT * normal.log_prob(sample) + ENTROPY_WEIGHT * normal.entropy()).sum()
    of_mean, of_log_std = torch.autograd.grad(total, [mean, log_std])
    score_of_mean, score_of_log_std = normal_score(mean.detach(), log_std.detach(), sample, WEIGHT, ENTROPY_WEIGHT)
    close(score_of_mean, of_mean)
    close(score_of_log_std.sum(0), of_log_std)
    without = normal_score(mean.detach(), log_std.detach(), sample, WEIGHT)[1]
    close(score_of_log_std - without, ENTROPY_WEIGHT.unsqueeze(-1).expand(N, A))
