from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rein.ops.distributions import Categorical, MultiDiscrete
from rein.ops.random import generator

N = 50
ACTIONS = [1, 2, 3, 15, 16, 40]  # few and many actions are computed along different dimensions
LARGEST_NOISE = 1.0 - 2.0**-24
SIZES = (3, 2, 5)


def logits_of(actions: int, seed: int = 0, rows: int = N) -> Tensor:
    return 3.0 * torch.randn(rows, actions, generator=generator(seed, "logits"))


def mask_of(actions: int, seed: int = 0, rows: int = N) -> Tensor:
    """Return a mask with at least one allowed action per row."""
    stream = generator(seed, "mask")
    mask = torch.rand(rows, actions, generator=stream) < 0.5
    return mask.scatter(1, torch.randint(actions, (rows, 1), generator=stream), True)


def reference(logits: Tensor) -> torch.distributions.Categorical:
    return torch.distributions.Categorical(logits=logits.double())


def close(result: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(result.double(), expected.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("actions", ACTIONS)
def test_categorical_matches_the_reference(actions: int) -> None:
    logits, other = logits_of(actions), logits_of(actions, seed=1)
    distribution, action = Categorical.from_logits(logits), torch.arange(N) % actions
    close(distribution.log_prob(action), reference(logits).log_prob(action))
    close(distribution.entropy(), reference(logits).entropy())
    kl = torch.distributions.kl_divergence(reference(logits), reference(other))
    close(distribution.kl(Categorical.from_logits(other)), kl)
    assert torch.equal(distribution.mode(), logits.argmax(-1))


@pytest.mark.parametrize("actions", [2, 6, 20])
def test_share_of_noise_for_an_action_is_its_probability(actions: int) -> None:
    rows = 10_000
    distribution = Categorical.from_logits(logits_of(actions, rows=1).expand(rows, actions))
    count = distribution.sample_from((torch.arange(rows) + 0.5) / rows).bincount(minlength=actions)
    assert ((count / rows - distribution.log_probs[0].exp()).abs() <= 1.0 / rows).all()


def test_equal_generators_draw_equal_actions_from_one_number_each() -> None:
    distribution, stream = Categorical.from_logits(logits_of(4)), generator(0, "agent")
    noise = torch.rand(N, generator=generator(0, "agent"))
    assert torch.equal(distribution.sample(stream), distribution.sample_from(noise))
    assert not torch.equal(distribution.noise(stream), noise)


@pytest.mark.parametrize("scale", [1.0, 1e6])
@pytest.mark.parametrize("actions", ACTIONS)
def test_masked_action_is_never_drawn_and_has_probability_zero(actions: int, scale: float) -> None:
    rows = 5_000
    mask = mask_of(actions, rows=rows)
    distribution = Categorical.from_logits(scale * logits_of(actions, rows=rows), mask)
    for noise in (torch.zeros(rows), torch.full((rows,), LARGEST_NOISE), distribution.noise(generator(0, "agent"))):
        assert mask.gather(1, distribution.sample_from(noise).unsqueeze(1)).all()
    assert mask.gather(1, distribution.mode().unsqueeze(1)).all()
    assert (distribution.log_probs.exp()[~mask] == 0.0).all()
    assert distribution.log_probs.isfinite().all()


@pytest.mark.parametrize("actions", [3, 20])
def test_masked_categorical_equals_one_over_the_allowed_actions(actions: int) -> None:
    logits, other, mask = logits_of(actions), logits_of(actions, seed=1), mask_of(actions)
    distribution, its_other = Categorical.from_logits(logits, mask), Categorical.from_logits(other, mask)
    for row in range(N):
        left, left_other = reference(logits[row, mask[row]]), reference(other[row, mask[row]])
        close(distribution.log_probs[row, mask[row]], left.logits)
        close(distribution.entropy()[row], left.entropy())
        close(distribution.kl(its_other)[row], torch.distributions.kl_divergence(left, left_other))


@pytest.mark.parametrize("actions", [3, 20])
def test_masks_and_extreme_logits_keep_gradients_finite(actions: int) -> None:
    logits, mask = (100.0 * logits_of(actions)).requires_grad_(), mask_of(actions)
    distribution = Categorical.from_logits(logits, mask)
    (
        distribution.log_prob(distribution.mode()) + distribution.entropy() + distribution.kl(distribution)
    ).sum().backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()
    assert (logits.grad[~mask] == 0.0).all()


def test_row_without_allowed_actions_is_uniform_and_finite() -> None:
    distribution = Categorical.from_logits(logits_of(4), torch.zeros(N, 4, dtype=torch.bool))
    close(distribution.log_probs.exp(), torch.full((N, 4), 0.25))


@pytest.mark.parametrize("actions", [3, 20])
def test_gradients_of_a_categorical_match_its_values(actions: int) -> None:
    action, other = torch.arange(4) % actions, Categorical.from_logits(logits_of(actions, 1, rows=4).double())

    def values(logits: Tensor) -> tuple[Tensor, ...]:
        distribution = Categorical.from_logits(logits)
        return distribution.log_prob(action), distribution.entropy(), distribution.kl(other)

    assert torch.autograd.gradcheck(values, logits_of(actions, rows=4).double().requires_grad_())


def test_further_dimensions_can_precede() -> None:
    logits = logits_of(3).view(5, 10, 3)
    distribution, flat = Categorical.from_logits(logits), Categorical.from_logits(logits.view(N, 3))
    action = distribution.sample(generator(0, "agent"))
    assert action.shape == (5, 10)
    assert torch.equal(distribution.log_prob(action).view(N), flat.log_prob(action.view(N)))
    close(distribution.entropy().view(N), flat.entropy())


def parts(logits: Tensor) -> list[Categorical]:
    return [Categorical.from_logits(part) for part in logits.split(SIZES, -1)]


def test_multi_discrete_matches_separate_categoricals() -> None:
    logits, other = logits_of(sum(SIZES)), logits_of(sum(SIZES), seed=1)
    distribution = MultiDiscrete.from_logits(logits, SIZES)
    action = torch.stack([torch.arange(N) % size for size in SIZES], -1)
    close(distribution.log_prob(action), sum(p.log_prob(action[:, k]) for k, p in enumerate(parts(logits))))
    close(distribution.entropy(), sum(p.entropy() for p in parts(logits)))
    close(
        distribution.kl(MultiDiscrete.from_logits(other, SIZES)),
        sum(p.kl(q) for p, q in zip(parts(logits), parts(other), strict=True)),
    )
    assert torch.equal(distribution.mode(), torch.stack([p.mode() for p in parts(logits)], -1))
    noise = distribution.noise(generator(0, "agent"))
    drawn = [p.sample_from(noise[:, k]) for k, p in enumerate(parts(logits))]
    assert torch.equal(distribution.sample(generator(0, "agent")), torch.stack(drawn, -1))


def test_missing_choices_of_a_smaller_categorical_are_never_drawn() -> None:
    rows = 2_000
    distribution = MultiDiscrete.from_logits(logits_of(sum(SIZES), rows=rows), SIZES)
    for noise in (torch.full((rows, 3), LARGEST_NOISE), distribution.noise(generator(0, "agent"))):
        assert (distribution.sample_from(noise) < torch.tensor(SIZES)).all()


def test_mask_of_multi_discrete_matches_separate_masks() -> None:
    logits, mask = logits_of(sum(SIZES)), torch.cat([mask_of(size, seed) for seed, size in enumerate(SIZES)], -1)
    distribution = MultiDiscrete.from_logits(logits, SIZES, mask)
    for k, (part, its_mask) in enumerate(zip(logits.split(SIZES, -1), mask.split(SIZES, -1), strict=True)):
        own = Categorical.from_logits(part, its_mask)
        close(distribution.log_probs[:, k, : SIZES[k]].exp(), own.log_probs.exp())
        assert its_mask.gather(1, distribution.sample(generator(k, "agent"))[:, k : k + 1]).all()


def test_sizes_that_do_not_sum_to_the_logits_raise() -> None:
    with pytest.raises(ValueError, match=r"add up to 10, but a row has 9 logits"):
        MultiDiscrete.from_logits(logits_of(9), SIZES)


@pytest.mark.parametrize(
    "distribution", [Categorical.from_logits(logits_of(4)), MultiDiscrete.from_logits(logits_of(6), (4, 2))]
)
def test_action_is_the_sample(distribution: Categorical | MultiDiscrete) -> None:
    sample = distribution.sample(generator(0, "agent"))
    assert distribution.to_action(sample) is sample
    assert distribution.from_action(sample) is sample
