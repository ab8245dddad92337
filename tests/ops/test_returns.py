from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from rein.ops.random import generator
from rein.ops.returns import discounted_returns, gae, lambda_returns, n_step_returns, smooth_rewards, vtrace

T, N = 17, 9
GAMMA = 0.9
SEEDS = range(4)


class Rollout(NamedTuple):
    reward: Tensor
    terminated: Tensor
    truncated: Tensor
    value: Tensor
    next_value: Tensor
    valid: Tensor
    log_ratio: Tensor


def rollout(seed: int, steps: int = T, *, all_valid: bool = False) -> Rollout:
    """Return episodes of all kinds, with invalid rows. If a trace continues, the next value is that of the next row."""
    stream = generator(seed, "rollout")
    reward, value, next_value, log_ratio = torch.randn(4, steps, N, generator=stream).unbind()
    terminated = torch.rand(steps, N, generator=stream) < 0.12
    truncated = torch.rand(steps, N, generator=stream) < 0.12
    valid = torch.rand(steps, N, generator=stream) > (-1.0 if all_valid else 0.15)
    result = Rollout(reward, terminated, truncated, value, next_value, valid, log_ratio)
    on = torch.tensor([[goes_on(result, t, n) for n in range(N)] for t in range(steps)])
    next_value[:-1] = torch.where(on[:-1], value[1:], next_value[:-1])
    return result


def goes_on(x: Rollout, t: int, n: int) -> bool:
    """Return whether the row after t belongs to its trace."""
    ended = x.terminated[t, n] or x.truncated[t, n]
    return t + 1 < len(x.reward) and bool(x.valid[t, n]) and bool(x.valid[t + 1, n]) and not ended


def run_of(x: Rollout, t: int, n: int) -> list[int]:
    """Return the rows from t to the end of its trace."""
    rows = [t]
    while goes_on(x, rows[-1], n):
        rows.append(rows[-1] + 1)
    return rows


def bootstrap(x: Rollout, t: int, n: int) -> float:
    return 0.0 if x.terminated[t, n] else x.next_value[t, n].item()


def table(x: Rollout, of_row: Callable[[int, int], float]) -> Tensor:
    """Return a reference, (T, N) float64: `of_row` for each valid row, 0 elsewhere."""
    rows = [[of_row(t, n) if x.valid[t, n] else 0.0 for n in range(N)] for t in range(len(x.reward))]
    return torch.tensor(rows, dtype=torch.float64)


def n_step_at(x: Rollout, t: int, n: int, steps: int) -> float:
    rows = run_of(x, t, n)[:steps]
    return sum(GAMMA**k * x.reward[s, n].item() for k, s in enumerate(rows)) + GAMMA ** len(rows) * bootstrap(
        x, rows[-1], n
    )


def lambda_at(x: Rollout, t: int, n: int, lambda_: float) -> float:
    """Compute the weighted mean of all n-step returns; the last one has the remaining weight."""
    steps = len(run_of(x, t, n))
    weights = [(1.0 - lambda_) * lambda_ ** (k - 1) for k in range(1, steps)] + [lambda_ ** (steps - 1)]
    return sum(w * n_step_at(x, t, n, k) for k, w in enumerate(weights, start=1))


def delta_at(x: Rollout, t: int, n: int) -> float:
    return x.reward[t, n].item() + GAMMA * bootstrap(x, t, n) - x.value[t, n].item()


def correction_at(x: Rollout, t: int, n: int, lambda_: float, rho_clip: float, c_clip: float) -> float:
    """Sum the products of c, rho and temporal differences over the trace."""
    total, product = 0.0, 1.0
    for s in run_of(x, t, n):
        ratio = math.exp(x.log_ratio[s, n].item())
        total += product * min(rho_clip, ratio) * delta_at(x, s, n)
        product *= GAMMA * lambda_ * min(c_clip, ratio)
    return total


def close(result: Tensor, reference: Tensor) -> None:
    torch.testing.assert_close(result.double(), reference.double(), rtol=1e-5, atol=2e-5)


def returns_of(x: Rollout, **options: Any) -> Tensor:
    return discounted_returns(x.reward, x.terminated, x.truncated, x.next_value, x.valid, **{"gamma": GAMMA, **options})


def lambda_returns_of(x: Rollout, **options: Any) -> Tensor:
    return lambda_returns(
        x.reward, x.terminated, x.truncated, x.next_value, x.valid, **{"gamma": GAMMA, "lambda_": 0.7, **options}
    )


def n_step_of(x: Rollout, **options: Any) -> Tensor:
    return n_step_returns(
        x.reward, x.terminated, x.truncated, x.next_value, x.valid, **{"gamma": GAMMA, "n": 3, **options}
    )


def gae_of(x: Rollout, **options: Any) -> Tensor:
    return gae(*x[:6], **{"gamma": GAMMA, "lambda_": 0.7, **options})


def vtrace_of(x: Rollout, **options: Any) -> Any:
    return vtrace(x.log_ratio, *x[:6], **{"gamma": GAMMA, **options})


def vtrace_target(x: Rollout, **options: Any) -> Tensor:
    return vtrace_of(x, lambda_=0.8, c_clip=0.7, **options).target


def vtrace_advantage(x: Rollout, **options: Any) -> Tensor:
    return vtrace_of(x, lambda_=0.8, c_clip=0.7, **options).advantage


ESTIMATORS = [returns_of, lambda_returns_of, n_step_of, gae_of, vtrace_target, vtrace_advantage]
every_estimator = pytest.mark.parametrize("estimate", ESTIMATORS)


@pytest.mark.parametrize("seed", SEEDS)
def test_discounted_returns_sum_rewards_to_the_end_of_the_trace(seed: int) -> None:
    x = rollout(seed)
    close(returns_of(x), table(x, lambda t, n: n_step_at(x, t, n, T)))


@pytest.mark.parametrize("steps", [1, 2, 5, T, T + 3])
def test_n_step_returns_sum_n_rewards_and_a_value(steps: int) -> None:
    x = rollout(steps)
    close(n_step_of(x, n=steps), table(x, lambda t, n: n_step_at(x, t, n, steps)))


@pytest.mark.parametrize("lambda_", [0.0, 0.3, 0.95, 1.0])
def test_lambda_returns_are_weighted_means_of_n_step_returns(lambda_: float) -> None:
    x = rollout(0)
    close(lambda_returns_of(x, lambda_=lambda_), table(x, lambda t, n: lambda_at(x, t, n, lambda_)))


@pytest.mark.parametrize("lambda_", [0.0, 0.3, 0.95, 1.0])
def test_advantages_sum_discounted_temporal_differences(lambda_: float) -> None:
    x = rollout(1)
    expected = table(
        x,
        lambda t, n: sum((GAMMA * lambda_) ** k * delta_at(x, s, n) for k, s in enumerate(run_of(x, t, n))),
    )
    close(gae_of(x, lambda_=lambda_), expected)


@pytest.mark.parametrize(
    ("lambda_", "rho_clip", "c_clip"), [(1.0, 1.0, 1.0), (0.9, 0.5, 0.8), (1.0, 2.0, 1.0), (0.8, math.inf, 1.5)]
)
def test_vtrace_matches_its_equation(lambda_: float, rho_clip: float, c_clip: float) -> None:
    x = rollout(2)
    result = vtrace_of(x, lambda_=lambda_, rho_clip=rho_clip, c_clip=c_clip)

    def correction(t: int, n: int) -> float:
        return correction_at(x, t, n, lambda_, rho_clip, c_clip)

    def advantage(t: int, n: int) -> float:
        ahead = lambda_ * correction(t + 1, n) if goes_on(x, t, n) else 0.0
        return min(rho_clip, math.exp(x.log_ratio[t, n].item())) * (delta_at(x, t, n) + GAMMA * ahead)

    close(result.target, table(x, lambda t, n: x.value[t, n].item() + correction(t, n)))
    close(result.advantage, table(x, advantage))


@every_estimator
def test_next_value_matters_at_truncation_and_not_at_termination(estimate: Callable[..., Tensor]) -> None:
    x = rollout(9, all_valid=True)
    x.terminated[8], x.truncated[8] = False, True
    higher = x.next_value.clone()
    higher[8] += 1.0
    change_N = (estimate(x._replace(next_value=higher)) - estimate(x))[8]
    weight_N = x.log_ratio[8].exp().clamp(max=1.0) if estimate in (vtrace_target, vtrace_advantage) else 1.0
    close(change_N, torch.full((N,), GAMMA) * weight_N)
    x.terminated[8] = True
    anything = x.next_value.clone()
    anything[8] = torch.nan
    assert torch.equal(estimate(x._replace(next_value=anything)), estimate(x))
    assert estimate(x).isfinite().all()


@every_estimator
def test_invalid_rows_are_ignored_whatever_they_contain(estimate: Callable[..., Tensor]) -> None:
    x = rollout(10)
    garbage = Rollout(
        *(torch.where(x.valid, field, torch.nan) if field.is_floating_point() else field for field in x)
    )._replace(terminated=x.terminated & x.valid, truncated=x.truncated | ~x.valid)
    assert torch.equal(estimate(garbage), estimate(x))
    assert (estimate(x)[~x.valid] == 0.0).all()


@every_estimator
def test_without_a_mask_all_rows_are_valid(estimate: Callable[..., Tensor]) -> None:
    x = rollout(13, all_valid=True)
    assert torch.equal(estimate(x), estimate(x._replace(valid=None)))


@every_estimator
def test_no_gradient_flows_and_arguments_are_not_modified(estimate: Callable[..., Tensor]) -> None:
    x = rollout(14)
    learned = x._replace(value=x.value.clone().requires_grad_(), next_value=x.next_value.clone().requires_grad_())
    before = [field.detach().clone() for field in learned]
    assert not estimate(learned).requires_grad
    assert all(torch.equal(a.detach(), b) for a, b in zip(learned, before, strict=True))


@every_estimator
def test_further_dimensions_are_independent(estimate: Callable[..., Tensor]) -> None:
    one, other = rollout(15), rollout(16)
    both = Rollout(*(torch.stack(pair, dim=-1) for pair in zip(one, other, strict=True)))
    assert torch.equal(estimate(both), torch.stack([estimate(one), estimate(other)], dim=-1))


@every_estimator
def test_single_row_works(estimate: Callable[..., Tensor]) -> None:
    x = rollout(17, steps=1)
    assert estimate(x).shape == (1, N)


def test_n_of_zero_raises() -> None:
    with pytest.raises(ValueError, match="n must be at least 1"):
        n_step_of(rollout(0), n=0)


@pytest.mark.parametrize("seed", SEEDS)
def test_smooth_rewards_sum_future_rewards_of_the_trace(seed: int) -> None:
    x, decay = rollout(seed), 0.7
    given = x.reward.clone()

    def smooth_at(t: int, n: int) -> float:
        return sum(decay**k * x.reward[s, n].item() for k, s in enumerate(run_of(x, t, n)))

    result = smooth_rewards(x.reward, x.terminated, x.truncated, x.valid, decay=decay)
    torch.testing.assert_close(result.double(), table(x, smooth_at), rtol=1e-5, atol=1e-5)
    assert torch.equal(x.reward, given)


def test_decay_of_zero_returns_a_copy_of_the_rewards() -> None:
    x = rollout(0, all_valid=True)
    result = smooth_rewards(x.reward, x.terminated, x.truncated, decay=0.0)
    assert torch.equal(result, x.reward)
    assert result.data_ptr() != x.reward.data_ptr()
