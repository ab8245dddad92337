from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from rein.ops.random import generator
from rein.ops.statistics import (
    Moments,
    bootstrap_interval,
    deviation,
    empty_moments,
    explained_variance,
    global_norm,
    interquartile_mean,
    masked_mean,
    masked_std,
    normalize,
    standardize,
    update_moments,
)

B, FEATURES = 300, 4


def rows(seed: int = 0, count: int = B) -> tuple[Tensor, Tensor]:
    stream = generator(seed, "rows")
    scale, offset = torch.tensor([1.0, 0.01, 100.0, 5.0]), torch.tensor([0.0, 3.0, -50.0, 1000.0])
    return torch.randn(count, FEATURES, generator=stream) * scale + offset, torch.rand(count, generator=stream) < 0.7


def with_garbage(x: Tensor, valid: Tensor) -> Tensor:
    return x.masked_fill(~valid.reshape(valid.shape + (1,) * (x.ndim - valid.ndim)), torch.nan)


def close(result: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(result.double(), expected.double(), rtol=tolerance, atol=tolerance)


def variance(moments: Moments) -> Tensor:
    return moments.m2 / moments.rows


def test_masked_statistics_use_only_valid_rows() -> None:
    x, valid = rows()
    column, left = with_garbage(x, valid)[:, 0], x[valid, 0]
    close(masked_mean(column, valid), left.mean())
    close(masked_std(column, valid), left.std(correction=0))
    close(standardize(column, valid)[valid], (left - left.mean()) / left.std(correction=0))
    assert (standardize(column, valid)[~valid] == 0.0).all()


def test_without_a_mask_all_rows_count() -> None:
    column, all_valid = rows()[0][:, 0], torch.ones(B, dtype=torch.bool)
    for function in (masked_mean, masked_std, standardize):
        close(function(column), function(column, all_valid))
    close(explained_variance(column + 1.0, column), explained_variance(column + 1.0, column, all_valid))


def test_mean_and_deviation_of_no_rows_are_zero() -> None:
    nothing, none_valid = torch.full((3,), torch.nan), torch.zeros(3, dtype=torch.bool)
    assert masked_mean(nothing, none_valid) == masked_std(nothing, none_valid) == 0.0
    assert (standardize(nothing, none_valid) == 0.0).all()
    assert (standardize(torch.full((7,), 3.0)) == 0.0).all()


def test_gradient_of_a_masked_mean_reaches_only_valid_rows() -> None:
    x, valid = torch.randn(B, generator=generator(0, "x"), requires_grad=True), rows()[1]
    (gradient,) = torch.autograd.grad(masked_mean(x, valid), x)
    close(gradient, valid / valid.sum())


def test_explained_variance_is_one_for_the_target_and_zero_for_constants() -> None:
    target, valid = rows()[0][:, 0], rows()[1]
    noise = 0.5 * torch.randn(B, generator=generator(0, "noise"))
    close(explained_variance(target, target), torch.tensor(1.0))
    close(explained_variance(target + 3.0, target), torch.tensor(1.0))
    close(explained_variance(torch.full_like(target, 2.0), target), torch.tensor(0.0))
    close(explained_variance(2.0 * target, target), torch.tensor(0.0))
    assert explained_variance(-target, target) < 0.0
    left = 1.0 - noise[valid].var() / target[valid].var()
    close(explained_variance(target + noise, with_garbage(target, valid), valid), left)


@pytest.mark.parametrize("constant", [0.0, 0.1, 1e6])
def test_explained_variance_is_nan_if_targets_vary_only_by_rounding(constant: float) -> None:
    value, target = torch.randn(B, generator=generator(0, "v")), torch.full((B,), constant)
    assert explained_variance(value, target).isnan()
    if constant:
        target[::2] = torch.nextafter(target[::2], torch.tensor(torch.inf))
        assert explained_variance(value, target).isnan()


def test_explained_variance_does_not_depend_on_the_unit() -> None:
    value, target = rows()[0][:, 0], rows(1)[0][:, 0]
    close(explained_variance(1e-6 * value, 1e-6 * target), explained_variance(value, target), 1e-4)


@pytest.mark.parametrize("sizes", [[B], [1, B - 1], [100, 0, 150, 50], [1] * B])
def test_moments_do_not_depend_on_the_batches(sizes: list[int]) -> None:
    x, valid = rows()
    moments = empty_moments((FEATURES,))
    for part, its_valid in zip(with_garbage(x, valid).split(sizes), valid.split(sizes), strict=True):
        moments = update_moments(moments, part, its_valid)
    left = x[valid].double()
    assert moments.rows == valid.sum()
    close(moments.mean, left.mean(0), 1e-10)
    close(variance(moments), left.var(0, correction=0), 1e-10)


def test_moments_of_small_differences_far_from_zero_are_accurate() -> None:
    noise = torch.randn(1_000, 1, generator=generator(0, "noise"), dtype=torch.float64)
    moments = empty_moments((1,))
    for part in (1e8 + noise).split(10):
        moments = update_moments(moments, part)
    close(variance(moments), noise.var(0, correction=0), 1e-6)


def test_rows_can_have_several_leading_dimensions_or_be_numbers() -> None:
    x, valid = rows()
    flat = update_moments(empty_moments((FEATURES,)), x, valid)
    folded = update_moments(empty_moments((FEATURES,)), x.view(30, 10, FEATURES), valid.view(30, 10))
    assert all(torch.equal(a, b) for a, b in zip(flat, folded, strict=True))
    number = update_moments(empty_moments(), x[:, 0], valid)
    close(number.mean, flat.mean[0], 1e-12)


def test_batch_without_valid_rows_changes_nothing() -> None:
    x, valid = rows()
    moments = update_moments(empty_moments((FEATURES,)), x, valid)
    after = update_moments(moments, with_garbage(x, torch.zeros_like(valid)), torch.zeros_like(valid))
    assert all(torch.equal(a, b) for a, b in zip(moments, after, strict=True))


@pytest.mark.parametrize("shape", [(FEATURES,), (B, FEATURES + 1), (B,)])
def test_rows_of_another_shape_raise(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"expected rows of shape \(4,\)"):
        update_moments(empty_moments((FEATURES,)), torch.zeros(shape))


def test_normalized_rows_have_mean_zero_and_deviation_one() -> None:
    x = rows(count=2_000)[0]
    normal = normalize(x, update_moments(empty_moments((FEATURES,)), x))
    assert normal.dtype == torch.float32
    close(normal.mean(0), torch.zeros(FEATURES), 1e-3)
    close(normal.std(0, correction=0), torch.ones(FEATURES), 1e-3)


def test_normalizing_before_the_first_row_changes_nothing() -> None:
    x = torch.tensor([[-2.0, 0.5, 3.0, 9.0]])
    close(normalize(x, empty_moments((FEATURES,))), x)
    close(deviation(empty_moments()), torch.tensor(1.0))


def test_normalized_values_are_clipped_and_constant_features_are_zero() -> None:
    moments = update_moments(empty_moments((1,)), torch.full((10, 1), 4.0))
    assert normalize(torch.full((1, 1), 4.0), moments) == 0.0
    assert normalize(torch.full((1, 1), 5.0), moments) == 10.0
    assert normalize(torch.full((1, 1), 5.0), moments, clip=math.inf) > 1e3


def gradients() -> list[Tensor]:
    return [torch.randn(shape, generator=generator(3, "gradient")) for shape in ((3, 4), (5,), ())]


def test_global_norm_is_that_of_one_concatenated_vector() -> None:
    close(global_norm(gradients()), torch.cat([x.flatten() for x in gradients()]).norm())
    assert global_norm([]) == 0.0
    assert not global_norm([*gradients(), torch.tensor([torch.inf])]).isfinite()


def trimmed(scores: np.ndarray) -> float:
    """Return the interquartile mean, computed with NumPy."""
    ordered = sorted(scores.ravel().tolist())
    cut = int(0.25 * len(ordered))
    kept = ordered[cut : len(ordered) - cut]
    return math.fsum(kept) / len(kept)


@pytest.mark.parametrize("shape", [(1, 1), (3, 1), (4, 1), (10, 1), (5, 3), (7, 6)])
def test_interquartile_mean_equals_reference(shape):
    scores = np.random.default_rng(0).normal(size=(2, *shape))
    found = interquartile_mean(torch.tensor(scores))
    assert found.tolist() == pytest.approx([trimmed(one) for one in scores], rel=1e-12)


def test_bootstrap_interval_equals_reference():
    scores = np.random.default_rng(0).normal(size=(6, 3))
    drawn = torch.randint(6, (200, 6, 3), generator=generator(0, "bootstrap")).numpy()
    means = [trimmed(np.stack([scores[index[:, task], task] for task in range(3)])) for index in drawn]
    expected = np.percentile(means, [5.0, 95.0])
    found = bootstrap_interval(torch.tensor(scores), generator(0, "bootstrap"), level=0.9, resamples=200)
    assert found.tolist() == pytest.approx(expected.tolist(), rel=1e-12)
