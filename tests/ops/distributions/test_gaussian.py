from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from rein.ops.distributions import Normal, SquashedNormal
from rein.ops.random import generator

N, A = 40, 3
LOW, HIGH = torch.tensor([-1.0, 0.0, -0.1]), torch.tensor([1.0, 5.0, 0.3])


def parameters(seed: int = 0, *, shared_std: bool = False) -> tuple[Tensor, Tensor]:
    stream = generator(seed, "parameters")
    mean, log_std = torch.randn(N, A, generator=stream), 0.5 * torch.randn(N, A, generator=stream)
    return mean, log_std[0] if shared_std else log_std


def reference(mean: Tensor, log_std: Tensor) -> torch.distributions.Independent:
    normal = torch.distributions.Normal(mean.double(), log_std.double().exp())
    return torch.distributions.Independent(normal, 1)


def squashed(mean: Tensor, log_std: Tensor) -> torch.distributions.TransformedDistribution:
    transforms = [
        torch.distributions.TanhTransform(),
        torch.distributions.AffineTransform((HIGH + LOW).double() / 2, (HIGH - LOW).double() / 2, event_dim=1),
    ]
    return torch.distributions.TransformedDistribution(reference(mean, log_std), transforms)


def close(result: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(result.double(), expected.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("shared_std", [False, True])
def test_gaussian_matches_the_reference(shared_std: bool) -> None:
    mean, log_std = parameters(shared_std=shared_std)
    other = parameters(1)
    distribution, sample = Normal(mean, log_std), mean + 1.5
    close(distribution.log_prob(sample), reference(mean, log_std).log_prob(sample.double()))
    close(distribution.entropy(), reference(mean, log_std).entropy())
    kl = torch.distributions.kl_divergence(reference(mean, log_std), reference(*other))
    close(distribution.kl(Normal(*other)), kl)
    assert distribution.entropy().shape == distribution.kl(distribution).shape == (N,)
    assert distribution.mode() is mean


@pytest.mark.parametrize("shared_std", [False, True])
def test_squashed_gaussian_matches_the_reference(shared_std: bool) -> None:
    mean, log_std = parameters(shared_std=shared_std)
    distribution = SquashedNormal(mean, log_std, LOW, HIGH)
    sample = distribution.sample(generator(0, "agent"))
    action = distribution._replace(low=LOW.double(), high=HIGH.double()).to_action(sample.double())
    close(distribution.log_prob(sample), squashed(mean, log_std).log_prob(action), 1e-4)


def test_samples_have_the_given_mean_and_deviation() -> None:
    rows = 20_000
    mean, std = torch.tensor([-2.0, 0.5]), torch.tensor([0.3, 2.0])
    sample = Normal(mean.expand(rows, 2), std.log()).sample(generator(0, "agent"))
    assert ((sample.mean(0) - mean).abs() < 4.0 * std / rows**0.5).all()
    assert ((sample.std(0) / std - 1.0).abs() < 4.0 / (2.0 * rows) ** 0.5).all()


@pytest.mark.parametrize("kind", ["normal", "squashed"])
def test_samples_are_reparameterized_and_use_only_the_generator(kind: str) -> None:
    mean, log_std = (x.requires_grad_() for x in parameters())
    distribution = Normal(mean, log_std) if kind == "normal" else SquashedNormal(mean, log_std, LOW, HIGH)
    sample, noise = distribution.sample(generator(0, "agent")), torch.randn(N, A, generator=generator(0, "agent"))
    assert torch.equal(sample, distribution.sample_from(noise))
    gradient = torch.autograd.grad(sample.sum(), (mean, log_std))
    close(gradient[0], torch.ones(N, A))
    close(gradient[1], noise * log_std.detach().exp())


def test_clipped_gaussian_clips_the_action_but_not_the_sample() -> None:
    mean, log_std = parameters()
    free, distribution = Normal(mean, log_std), Normal(mean, log_std, LOW, HIGH)
    sample = distribution.sample(generator(0, "agent"))
    assert torch.equal(sample, free.sample(generator(0, "agent")))
    assert torch.equal(distribution.log_prob(sample), free.log_prob(sample))
    assert torch.equal(distribution.to_action(sample), torch.minimum(torch.maximum(sample, LOW), HIGH))
    assert not torch.equal(distribution.to_action(sample), sample)
    assert free.to_action(sample) is sample
    assert distribution.from_action(sample) is sample


@pytest.mark.parametrize("u", [-1e4, -50.0, -9.0, 0.0, 9.0, 50.0, 1e4])
def test_squashed_actions_stay_in_bounds_with_exact_density(u: float) -> None:
    distribution = SquashedNormal(torch.zeros(1, A), torch.zeros(A), LOW, HIGH)
    sample = torch.full((1, A), u)
    action = distribution.to_action(sample)
    assert ((action >= LOW) & (action <= HIGH)).all()
    slope = math.log(4.0) - 2.0 * abs(u) - 2.0 * math.log1p(math.exp(-2.0 * abs(u)))  # log slope of tanh, even in u
    expected = -0.5 * u**2 - 0.5 * math.log(2.0 * math.pi) - slope
    close(distribution.log_prob(sample)[0], A * expected - torch.log(0.5 * (HIGH - LOW)).sum())


def test_extreme_samples_keep_gradients_finite() -> None:
    mean, log_std = torch.tensor([[-40.0, 0.0, 40.0]], requires_grad=True), torch.zeros(A, requires_grad=True)
    distribution = SquashedNormal(mean, log_std, LOW, HIGH)
    sample = distribution.sample(generator(0, "agent"))
    (distribution.log_prob(sample) + distribution.entropy() + distribution.to_action(sample).sum(-1)).sum().backward()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in (mean, log_std))


def test_from_action_inverts_to_action_and_is_finite_at_bounds() -> None:
    distribution = SquashedNormal(torch.zeros(9, A), torch.zeros(A), LOW, HIGH)
    sample = torch.linspace(-4.0, 4.0, 9).unsqueeze(-1).expand(9, A)
    close(distribution.from_action(distribution.to_action(sample)), sample, 1e-3)
    for action in (LOW, HIGH, LOW - 1.0, HIGH + 1.0):
        assert (distribution.from_action(action.expand(9, A)).abs() < 8.0).all()
        assert distribution.log_prob(distribution.from_action(action.expand(9, A))).isfinite().all()


def dense_entropy(mean: Tensor, log_std: Tensor) -> Tensor:
    """Return the entropy by a sum over 20,001 points per dimension, in float64."""
    z = torch.linspace(-9.0, 9.0, 20_001, dtype=torch.float64)
    weight = torch.softmax(-0.5 * z.square(), 0)
    u = mean.double().unsqueeze(-1) + log_std.double().exp().unsqueeze(-1) * z
    slope = math.log(4.0) - 2.0 * u.abs() - 2.0 * torch.log1p(torch.exp(-2.0 * u.abs()))
    half_width = (0.5 * (HIGH - LOW)).double().log()
    return reference(mean, log_std).entropy() + ((slope * weight).sum(-1) + half_width).sum(-1)


@pytest.mark.parametrize(
    ("std", "tolerance"), [(0.05, 1e-5), (0.5, 1e-5), (1.0, 2e-5), (2.0, 4e-4), (3.0, 5e-3), (5.0, 0.05)]
)
def test_entropy_of_squashed_actions_is_as_accurate_as_documented(std: float, tolerance: float) -> None:
    mean, log_std = 3.0 * parameters()[0], torch.full((A,), math.log(std))
    error = SquashedNormal(mean, log_std, LOW, HIGH).entropy().double() - dense_entropy(mean, log_std)
    assert error.abs().max() < A * tolerance


def test_entropy_of_squashed_actions_is_the_mean_negative_log_density() -> None:
    rows = 50_000
    distribution = SquashedNormal(torch.full((rows, A), 0.6), torch.tensor([-1.0, 0.0, 0.5]), LOW, HIGH)
    surprise = -distribution.log_prob(distribution.sample(generator(0, "agent")))
    assert abs(surprise.mean() - distribution.entropy()[0]) < 4.0 * surprise.std() / rows**0.5


def test_mode_of_a_squashed_gaussian_is_the_median_action() -> None:
    rows = 20_001
    distribution = SquashedNormal(torch.full((rows, 1), 0.8), torch.zeros(1), LOW[:1], HIGH[:1])
    below = (
        (
            distribution.to_action(distribution.sample(generator(0, "agent")))
            < distribution.to_action(distribution.mode())
        )
        .float()
        .mean()
    )
    assert abs(below - 0.5) < 4.0 * 0.5 / rows**0.5


def test_squashing_keeps_the_kl_divergence() -> None:
    one, other = parameters(), parameters(1)
    distribution, its_other = SquashedNormal(*one, LOW, HIGH), SquashedNormal(*other, LOW, HIGH)
    assert torch.equal(distribution.kl(its_other), Normal(*one).kl(Normal(*other)))
    close(distribution.kl(distribution), torch.zeros(N))
    assert (distribution.kl(its_other) > 0.0).all()


@pytest.mark.parametrize("kind", ["normal", "squashed"])
def test_gradients_of_a_gaussian_match_its_values(kind: str) -> None:
    bounds = () if kind == "normal" else (LOW.double(), HIGH.double())
    made = Normal if kind == "normal" else SquashedNormal
    sample, other = torch.ones(2, A).double(), made(*(x[:2].double() for x in parameters(1)), *bounds)

    def values(mean: Tensor, log_std: Tensor) -> tuple[Tensor, ...]:
        distribution = made(mean, log_std, *bounds)
        return (
            distribution.log_prob(sample),
            distribution.entropy(),
            distribution.kl(other),
            distribution.to_action(distribution.sample_from(sample)),
        )

    assert torch.autograd.gradcheck(values, [x[:2].double().requires_grad_() for x in parameters()])


def test_actions_have_the_dtype_of_the_bounds() -> None:
    mean, log_std = (x.bfloat16() for x in parameters())
    distribution = SquashedNormal(mean, log_std, LOW, HIGH)
    assert (
        distribution.to_action(distribution.mode()).dtype
        == distribution.to_action(distribution.sample(generator(0, "agent"))).dtype
        == LOW.dtype
    )
