"""Terms of the policy-gradient loss.

Shapes: M rows, F features.
"""

from __future__ import annotations

import math

import pytest
import torch
from gymnasium import spaces
from torch import Tensor

from rein.agents.base.learner import Batch
from rein.agents.base.on_policy import Coefficients, policy_loss
from rein.networks.actor_critic import ActorCritic
from rein.ops.random import generator

M, F = 40, 3


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=generator(seed, "numbers"))


def networks() -> ActorCritic:
    drawn = generator(0, "networks")
    return ActorCritic(spaces.Box(-1.0, 1.0, (F,)), spaces.Discrete(4), drawn, hidden=(8,))


def batch(made: ActorCritic) -> Batch:
    x = numbers(M, F)
    with torch.no_grad():
        distribution, value = made(x)
        sample = distribution.sample(generator(1, "sample"))
    advantage, target = numbers(M, seed=2), numbers(M, seed=3)
    log_prob = distribution.log_prob(sample)
    return Batch(x, sample=sample, log_prob=log_prob, value=value, advantage=advantage, target=target)


def gradients(made: ActorCritic, rows: Batch, coefficients: Coefficients) -> list[Tensor]:
    loss, _ = policy_loss(made, rows, coefficients)
    return list(torch.autograd.grad(loss, [*made.parameters()], allow_unused=True, materialize_grads=True))


def test_loss_is_the_sum_of_its_terms() -> None:
    made = networks()
    loss, metrics = policy_loss(made, batch(made), Coefficients(0.2, 0.5, 0.1))
    torch.testing.assert_close(loss, metrics["policy_loss"] + 0.5 * metrics["value_loss"] - 0.1 * metrics["entropy"])
    distribution, value = made(batch(made).features)
    torch.testing.assert_close(metrics["entropy"], distribution.entropy().mean())
    torch.testing.assert_close(metrics["value_loss"], 0.5 * (value - batch(made).target).square().mean())


def test_clipped_ratio_is_learned_only_toward_1() -> None:
    """At a ratio of e, a positive advantage has no gradient, and a negative advantage has one."""
    made = networks()
    rows = batch(made)
    rows = rows._replace(log_prob=rows.log_prob - 1.0)
    for sign, learns in ((1.0, False), (-1.0, True)):
        found = gradients(made, rows._replace(advantage=sign * rows.advantage.abs()), Coefficients(0.2, 0.0, 0.0))
        assert any(gradient.any() for gradient in found) == learns
    _, metrics = policy_loss(made, rows, Coefficients(0.2, 0.0, 0.0))
    assert metrics["ratio"].item() == pytest.approx(math.e, rel=1e-5)
    assert metrics["clip_fraction"].item() == 1.0
    assert metrics["approx_kl"].item() == pytest.approx(math.e - 2.0, rel=1e-4)


def test_clip_none_disables_clipping() -> None:
    made = networks()
    rows = batch(made)
    for step in (1e-6, 1.0):
        _, metrics = policy_loss(made, rows._replace(log_prob=rows.log_prob - step), Coefficients(None, 0.5, 0.0))
        assert metrics["clip_fraction"].item() == 0.0
        assert metrics["ratio"].item() == pytest.approx(math.exp(step), rel=1e-5)


def test_invalid_rows_are_ignored() -> None:
    made = networks()
    rows = batch(made)
    valid = torch.arange(M) % 3 > 0
    garbage = [torch.where(valid, column, 1e6) for column in (rows.advantage, rows.target)]
    hidden = rows._replace(advantage=garbage[0], target=garbage[1], valid=valid)
    found, alone = (
        gradients(made, b, Coefficients(0.2, 0.5, 0.01)) for b in (hidden, rows.rows(valid.nonzero()[:, 0]))
    )
    for one, other in zip(found, alone, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)
    (_, metrics), (_, expected) = (
        policy_loss(made, b, Coefficients(0.2, 0.5, 0.01)) for b in (hidden, rows.rows(valid.nonzero()[:, 0]))
    )
    torch.testing.assert_close(metrics, expected)


@pytest.mark.parametrize("entropy", [0.0, 0.01])
def test_float_and_tensor_coefficients_are_equivalent(entropy: float) -> None:
    made = networks()
    rows, numbers_ = batch(made), Coefficients(0.2, 0.5, entropy, 0.3)
    tensors = Coefficients(*(torch.tensor(c) for c in numbers_))  # type: ignore[arg-type]  # tensors instead of floats
    for one, other in zip(gradients(made, rows, numbers_), gradients(made, rows, tensors), strict=True):
        torch.testing.assert_close(one, other, atol=1e-7, rtol=1e-6)
