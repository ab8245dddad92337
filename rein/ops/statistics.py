"""Statistics of tensors: masked means, standardization, running moments, norms, minibatch indices, scores of runs.

Shapes: N environments, B rows, O features, M minibatches; S runs, T tasks, R resamples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Moments(NamedTuple):
    """Mean and squared deviations of all rows so far, in float64 to stay accurate in long runs."""

    rows: Tensor  # () number of rows
    mean: Tensor  # (*O)
    m2: Tensor  # (*O) sum of squared deviations from the mean


def masked_mean(x_B: Tensor, valid_B: Tensor | None = None) -> Tensor:
    """Compute the mean of the valid elements, (); 0 if there are none. Invalid elements get no gradient."""
    if valid_B is None:
        return x_B.mean()
    return torch.where(valid_B, x_B, 0.0).sum() / valid_B.sum().clamp(min=1)


def masked_std(x_B: Tensor, valid_B: Tensor | None = None) -> Tensor:
    """Compute the standard deviation of the valid elements, (); 0 if there are none."""
    return masked_mean((x_B - masked_mean(x_B, valid_B)).square(), valid_B).sqrt()


def standardize(x_B: Tensor, valid_B: Tensor | None = None, epsilon: float = 1e-8) -> Tensor:
    """Return (x - mean) / (deviation + epsilon) of valid elements, 0 elsewhere; (B,). PPO applies it to advantages."""
    if valid_B is None:
        variance, mean = torch.var_mean(x_B, correction=0)
        return (x_B - mean) / (variance.sqrt() + epsilon)
    x_B = torch.where(valid_B, x_B - masked_mean(x_B, valid_B), 0.0)
    return x_B / (masked_mean(x_B.square(), valid_B).sqrt() + epsilon)


def explained_variance(value_B: Tensor, target_B: Tensor, valid_B: Tensor | None = None) -> Tensor:
    """Compute 1 - var(target - value) / var(target) of the valid elements, (): 1 is perfect, 0 equals a constant.

    NaN if all targets are equal up to rounding, since the ratio is then undefined.
    """
    target_B, error_B = target_B.double(), (target_B - value_B).double()
    deviation = masked_std(target_B, valid_B)
    rounding = torch.finfo(value_B.dtype).eps * masked_mean(target_B.abs(), valid_B)
    explained = 1.0 - (masked_std(error_B, valid_B) / deviation).square()
    return torch.where(deviation > rounding, explained, torch.nan).to(value_B.dtype)


def empty_moments(shape: Sequence[int] = (), device: torch.device | str = "cpu") -> Moments:
    """Return moments of zero rows, each of shape O."""
    rows = torch.zeros((), dtype=torch.float64, device=device)
    return Moments(rows, rows.new_zeros(tuple(shape)), rows.new_zeros(tuple(shape)))


def update_moments(moments: Moments, x_BO: Tensor, valid_B: Tensor | None = None) -> Moments:
    """Return the moments of all rows so far and of these. Batch order and sizes matter only to rounding.

    The moments of two sets a and b combine as::

        d = mean_b - mean_a      mean = mean_a + d * n_b / n      m2 = m2_a + m2_b + d^2 * n_a * n_b / n

    Raises ValueError if the rows have another shape than earlier ones.

    Source: Chan, Golub & LeVeque 1979, equations 2.1.
    """
    leading = tuple(range(x_BO.ndim - moments.mean.ndim))
    if not leading or x_BO.shape[len(leading) :] != moments.mean.shape:
        raise ValueError(f"expected rows of shape {tuple(moments.mean.shape)}, got data of shape {tuple(x_BO.shape)}")
    x_BO = x_BO.detach().double()
    if valid_B is None:
        valid_B = torch.ones(x_BO.shape[: len(leading)], dtype=torch.bool, device=x_BO.device)
    valid_BO = valid_B.reshape(valid_B.shape + (1,) * moments.mean.ndim)
    new_rows = valid_B.sum()
    mean = torch.where(valid_BO, x_BO, 0.0).sum(leading) / new_rows.clamp(min=1)
    m2 = torch.where(valid_BO, x_BO - mean, 0.0).square().sum(leading)
    rows, change = moments.rows + new_rows, mean - moments.mean
    share = new_rows / rows.clamp(min=1.0)
    return Moments(rows, moments.mean + change * share, moments.m2 + m2 + change.square() * moments.rows * share)


def deviation(moments: Moments, epsilon: float = 1e-8) -> Tensor:
    """Compute sqrt(variance + epsilon) of all rows so far, `(*O)` float32. Before the first row, the variance is 1."""
    variance = torch.where(moments.rows > 0.0, moments.m2 / moments.rows.clamp(min=1.0), 1.0)
    return (variance + epsilon).sqrt().float()


def normalize(x_BO: Tensor, moments: Moments, clip: float = 10.0, epsilon: float = 1e-8) -> Tensor:
    """Compute (x - mean) / sqrt(variance + epsilon), clipped to [-clip, clip]; `(B, *O)` float32."""
    return ((x_BO - moments.mean.float()) / deviation(moments, epsilon)).clamp(-clip, clip)


def global_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Compute the Euclidean norm of all elements of all tensors, (), on the device of the first one. 0 for no tensors.

    The norm is NaN or infinite if an element is.
    """
    if not tensors:
        return torch.zeros((), dtype=torch.float32, device="cpu")
    try:  # the operations of torch.nn.utils.get_total_norm, without its checks
        return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(list(tensors))))
    except (RuntimeError, NotImplementedError):  # sparse tensors, or tensors on several devices
        dense = (x.coalesce().values() if x.is_sparse else x for x in tensors)
        norms = [torch.linalg.vector_norm(x).to(tensors[0].device) for x in dense]
        return torch.linalg.vector_norm(torch.stack(norms))


def clip_by_norm_(tensors: Sequence[Tensor], norm: Tensor, max_norm: float) -> None:
    """Scale all tensors in place by one factor, so that their global norm, given as `norm`, is at most `max_norm`."""
    if tensors:
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(list(tensors), scale)


def minibatches(rows: int, count: int, generator: torch.Generator) -> Tensor:
    """Split a random permutation of 0 to rows - 1 into `count` minibatches; (M, rows // M) int64.

    All minibatches have the same size. The remaining rows, fewer than `count`, are dropped at random, so that over
    several calls no row is preferred. Raises ValueError if a minibatch would be empty.
    """
    if not 1 <= count <= rows:
        raise ValueError(f"{rows} rows, or sequences, cannot be cut into {count} minibatches: give 1 to {rows}")
    size = rows // count
    return torch.randperm(rows, generator=generator, device=generator.device)[: count * size].view(count, size)


def interquartile_mean(score_ST: Tensor) -> Tensor:
    """Compute the mean of the scores of S runs in T tasks without the lowest and the highest quarter.

    A quarter of S * T is rounded down. Leading dimensions are kept: (..., S, T) gives (...).

    Source: Agarwal et al. 2021, section 4.3.
    """
    sorted_ = score_ST.flatten(-2).sort().values
    cut = sorted_.shape[-1] // 4
    return sorted_[..., cut : sorted_.shape[-1] - cut].mean(-1)


def bootstrap_interval(
    score_ST: Tensor, generator: torch.Generator, level: float = 0.95, resamples: int = 10_000
) -> Tensor:
    """Compute a confidence interval of the interquartile mean of S runs in T tasks; (2,).

    The bootstrap is stratified: each resample draws S runs of each task with replacement. The interval is the range
    between the percentiles of the interquartile means of the resamples.

    Source: Agarwal et al. 2021, section 4.1.
    """
    runs, tasks = score_ST.shape
    drawn_RST = torch.randint(runs, (resamples, runs, tasks), generator=generator, device=generator.device)
    mean_R = interquartile_mean(score_ST.expand(resamples, runs, tasks).gather(1, drawn_RST))
    ends = torch.tensor([(1.0 - level) / 2.0, (1.0 + level) / 2.0], dtype=mean_R.dtype, device=mean_R.device)
    return mean_R.quantile(ends)
