from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from rein.ops.distributions import BallNormal, Normal
from rein.ops.random import generator

N, RADIUS = 40, torch.tensor(2.5)
DIMENSIONS = (1, 2, 3, 8)


def parameters(dimensions: int, seed: int = 0, *, shared_std: bool = False) -> tuple[Tensor, Tensor]:
    stream = generator(seed, "parameters")
    mean, log_std = (torch.randn(N, dimensions, generator=stream) for _ in range(2))
    return mean, 0.5 * (log_std[0] if shared_std else log_std)


def double(distribution: BallNormal) -> BallNormal:
    return BallNormal(*(x.double() for x in distribution))


def close(result: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(result.double(), expected.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("scale", [0.0, 1e-9, 1e-3, 0.29, 0.31, 1.0, 4.0])
@pytest.mark.parametrize("dimensions", DIMENSIONS)
def test_density_includes_the_jacobian_of_the_squashing(dimensions: int, scale: float) -> None:
    """Compare with the determinant of the Jacobian by automatic differentiation, for samples of any length."""
    distribution = double(BallNormal(*parameters(dimensions), RADIUS))
    direction = torch.nn.functional.normalize(parameters(dimensions, 1)[0].double(), dim=-1)
    sample = scale * direction[:5]
    jacobian = [torch.autograd.functional.jacobian(lambda u: distribution.to_action(u), u) for u in sample]
    stretched = torch.linalg.slogdet(torch.stack(jacobian)).logabsdet
    head = BallNormal(distribution.mean[:5], distribution.log_std[:5], distribution.radius)
    close(Normal(head.mean, head.log_std).log_prob(sample) - head.log_prob(sample), stretched, 2e-7)


@pytest.mark.parametrize("length", [0.0, 1e-30, 1e-7, 0.3, 9.0, 50.0, 1e4])
def test_samples_of_any_length_keep_densities_and_gradients_finite(length: float) -> None:
    mean, log_std = (x.requires_grad_() for x in parameters(3))
    distribution, sample = BallNormal(mean, log_std, RADIUS), torch.full((N, 3), length / 3**0.5, requires_grad=True)
    action = distribution.to_action(sample)
    assert (action.norm(dim=-1) <= RADIUS * (1.0 + 1e-6)).all()
    assert (action.abs() <= RADIUS).all()
    (distribution.log_prob(sample) + distribution.entropy() + action.sum(-1)).sum().backward()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in (mean, log_std, sample))


@pytest.mark.parametrize("dimensions", DIMENSIONS)
def test_from_action_inverts_to_action_and_is_finite_at_the_edge(dimensions: int) -> None:
    distribution = BallNormal(*parameters(dimensions), RADIUS)
    direction = torch.nn.functional.normalize(distribution.mean, dim=-1)
    for length in (0.0, 0.01, 1.0, 4.0):
        close(distribution.from_action(distribution.to_action(length * direction)), length * direction, 1e-3)
    for length in (1.0, 1.5):
        sample = distribution.from_action(length * RADIUS * direction)
        assert (sample.norm(dim=-1) < 9.0).all()
        close(torch.nn.functional.normalize(sample, dim=-1), direction)
        assert distribution.log_prob(sample).isfinite().all()


def radial_entropy(std: float, distance: float) -> float:
    """Return the entropy in two dimensions by a dense sum over u, in float64."""
    z = torch.linspace(-9.0, 9.0, 1_501, dtype=torch.float64)
    weight = torch.softmax(-0.5 * z.square(), 0)
    length = torch.hypot(distance + std * z[:, None], std * z)
    log_det = 2.0 * (math.log(2.0) - length - torch.log1p(torch.exp(-2.0 * length)))
    log_det = log_det + (length.tanh() / length).log().nan_to_num(0.0) + 2.0 * RADIUS.double().log()
    return float(2.0 * math.log(std) + math.log(2.0 * math.pi) + 1.0 + weight @ log_det @ weight)


@pytest.mark.parametrize(("std", "tolerance"), [(0.05, 3e-4), (0.5, 3e-4), (1.0, 3e-4), (5.0, 3e-4), (20.0, 0.02)])
@pytest.mark.parametrize("distance", [0.0, 1.0, 10.0])
def test_entropy_is_as_accurate_as_documented(std: float, tolerance: float, distance: float) -> None:
    distribution = BallNormal(torch.tensor([[distance, 0.0]]), torch.full((2,), math.log(std)), RADIUS)
    assert abs(float(distribution.entropy()) - radial_entropy(std, distance)) < tolerance


@pytest.mark.parametrize("dimensions", DIMENSIONS)
def test_entropy_is_the_mean_negative_log_density(dimensions: int) -> None:
    rows = 50_000
    log_std = torch.linspace(-1.0, 0.5, dimensions)
    distribution = BallNormal(torch.full((rows, dimensions), 0.6), log_std, RADIUS)
    surprise = -distribution.log_prob(distribution.sample(generator(0, "agent")))
    assert abs(surprise.mean() - distribution.entropy()[0]) < 4.0 * surprise.std() / rows**0.5


def test_further_dimensions_can_precede_and_kl_is_that_of_the_gaussians() -> None:
    mean, log_std = parameters(3)
    flat, other = BallNormal(mean, log_std, RADIUS), BallNormal(*parameters(3, 1), RADIUS)
    shaped = BallNormal(mean.view(4, 10, 3), log_std.view(4, 10, 3), RADIUS)
    close(shaped.entropy().flatten(), flat.entropy())
    close(shaped.log_prob(mean.view(4, 10, 3) + 1.0).flatten(), flat.log_prob(mean + 1.0))
    assert flat.entropy().shape == flat.kl(other).shape == (N,)
    assert torch.equal(flat.kl(other), Normal(mean, log_std).kl(Normal(*parameters(3, 1))))
    assert flat.mode() is mean


@pytest.mark.parametrize("dimensions", [1, 3])
def test_gradients_match_the_values(dimensions: int) -> None:
    radius = RADIUS.double()
    other = BallNormal(*(x[:3].double() for x in parameters(dimensions, 1)), radius)
    noise = torch.tensor([[0.05], [0.5], [2.0]]).expand(3, dimensions).double()

    def values(mean: Tensor, log_std: Tensor, sample: Tensor) -> tuple[Tensor, ...]:
        distribution = BallNormal(mean, log_std, radius)
        return (
            distribution.log_prob(sample),
            distribution.entropy(),
            distribution.kl(other),
            distribution.to_action(distribution.sample_from(noise)),
        )

    given = [x[:3].double().requires_grad_() for x in parameters(dimensions)]
    assert torch.autograd.gradcheck(values, [*given, noise.clone().requires_grad_()])


def test_actions_have_the_dtype_of_the_radius() -> None:
    distribution = BallNormal(*(x.bfloat16() for x in parameters(3)), RADIUS)
    assert distribution.to_action(distribution.mode()).dtype == RADIUS.dtype
