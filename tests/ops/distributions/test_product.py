"""Products of distributions: relations to their factors, and float64 references."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rein.ops.distributions import BallNormal, Categorical, MultiDiscrete, Normal, SquashedNormal
from rein.ops.distributions.product import Product
from rein.ops.random import generator
from rein.ops.trees import leaves, map_tree

N, A = 40, 3
SIZES = (3, 2, 5)
HIGH = torch.tensor([1.0, 5.0, 0.3])


def normal_of(seed: int, stream: str = "amount", width: int = A) -> Tensor:
    return torch.randn(N, width, generator=generator(seed, stream))


def product(seed: int = 0) -> Product:
    """Return a product of all kinds of distributions, one of them nested."""
    log_std = 0.5 * normal_of(seed, "std")
    switches = MultiDiscrete.from_logits(normal_of(seed, "switches", sum(SIZES)), SIZES)
    inner = Product({"switches": switches, "force": SquashedNormal(normal_of(seed), log_std, -HIGH, HIGH)})
    move = Categorical.from_logits(normal_of(seed, "move", 4))
    ball = BallNormal(normal_of(seed, "ball"), log_std, torch.tensor(2.0))
    return Product(
        {"move": move, "amount": Normal(normal_of(seed), log_std[0], -HIGH, HIGH), "arm": inner, "ball": ball}
    )


def close(result: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(result.double(), expected.double(), rtol=tolerance, atol=tolerance)


def same(result: object, expected: object) -> bool:
    pairs = zip(leaves(result), leaves(expected), strict=True)
    return all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs)


def test_quantities_are_sums_over_the_factors() -> None:
    mine, other = product(), product(1)
    sample = mine.sample(generator(0, "agent"))
    arm, theirs = mine.factors["arm"].factors, other.factors["arm"].factors
    parts = [(mine.factors[key], other.factors[key], sample[key]) for key in ("move", "amount", "ball")]
    parts += [(arm[key], theirs[key], sample["arm"][key]) for key in arm]
    close(mine.log_prob(sample), torch.stack([factor.log_prob(x) for factor, _, x in parts]).sum(0))
    close(mine.entropy(), torch.stack([factor.entropy() for factor, _, _ in parts]).sum(0))
    close(mine.kl(other), torch.stack([factor.kl(second) for factor, second, _ in parts]).sum(0))
    assert mine.log_prob(sample).shape == mine.entropy().shape == mine.kl(other).shape == (N,)


def test_sample_is_a_function_of_noise() -> None:
    distribution = product()
    noise = distribution.noise(generator(0, "agent"))
    assert same(distribution.sample_from(noise), distribution.sample(generator(0, "agent")))


def test_mode_has_the_structure_of_a_sample() -> None:
    distribution = product()
    mode, sample = distribution.mode(), distribution.sample(generator(0, "agent"))
    assert [(path, x.shape, x.dtype) for path, x in leaves(mode)] == [(p, x.shape, x.dtype) for p, x in leaves(sample)]
    assert torch.equal(mode["arm"]["switches"], distribution.factors["arm"].factors["switches"].mode())


def test_action_of_each_factor_is_converted() -> None:
    distribution = product()
    sample = distribution.sample(generator(0, "agent"))
    action = distribution.to_action(sample)
    assert torch.equal(action["move"], sample["move"])
    assert torch.equal(action["amount"], sample["amount"].clamp(-HIGH, HIGH))
    assert (action["arm"]["force"].abs() <= HIGH).all()
    back = distribution.from_action(action)
    close(back["arm"]["force"].clamp(-2.0, 2.0), sample["arm"]["force"].clamp(-2.0, 2.0), 1e-3)
    assert torch.equal(back["arm"]["switches"], sample["arm"]["switches"])


def test_gradients_reach_every_factor() -> None:
    parameters = map_tree(lambda x: x.clone().requires_grad_(), product())
    sample = map_tree(torch.Tensor.detach, parameters.sample(generator(0, "agent")))
    (parameters.log_prob(sample) + parameters.entropy() + parameters.kl(product(1))).sum().backward()
    unused = {"low", "high", "radius"}  # bounds change the density and the entropy by opposite amounts, or not at all
    for path, parameter in leaves(parameters):
        assert path.split(".")[-1] in unused or (parameter.grad is not None and parameter.grad.any()), path


@pytest.mark.parametrize("lead", [(4, 10), (40, 1)])
def test_further_dimensions_may_precede(lead: tuple[int, int]) -> None:
    flat = product()
    folded = map_tree(lambda x: x.unflatten(0, lead) if x.ndim and len(x) == N else x, flat)
    sample = flat.sample(generator(0, "agent"))
    shaped = map_tree(lambda x: x.unflatten(0, lead), sample)
    close(folded.log_prob(shaped), flat.log_prob(sample).unflatten(0, lead))
    close(folded.entropy(), flat.entropy().unflatten(0, lead))


def test_compiled_function_accepts_a_product() -> None:
    def loss(distribution: Product, sample: dict[str, Tensor]) -> Tensor:
        return (distribution.log_prob(sample) + distribution.entropy()).mean()

    distribution = product()
    sample = distribution.sample(generator(0, "agent"))
    close(torch.compile(loss, backend="eager")(distribution, sample), loss(distribution, sample))


def test_log_std_joins_all_gaussian_factors() -> None:
    normal = Normal(torch.zeros(5, 2), torch.tensor([-1.0, 0.5]))
    wide = Normal(torch.zeros(5, 1), torch.full((5, 1), 0.25))
    discrete = Categorical.from_logits(torch.zeros(5, 3))
    log_std = Product({"a": normal, "b": Product({"c": wide, "d": discrete})}).log_std
    assert log_std is not None
    assert torch.equal(log_std, torch.tensor([-1.0, 0.5, 0.25]).expand(5, 3))
    assert Product({"d": discrete}).log_std is None
