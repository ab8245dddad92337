"""Losses per row. Callers average them, with `masked_mean` of `rein.ops.statistics` if some rows are invalid.

Shapes: B rows, C classes, Q quantiles, S samples of a target.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Surrogate(NamedTuple):
    """Result of `clipped_surrogate`, (B,) each. Only `loss` carries a gradient."""

    loss: Tensor
    ratio: Tensor  # pi / pi_old
    approx_kl: Tensor  # its mean estimates KL(pi_old || pi); non-negative up to rounding
    clipped: Tensor  # 1 if the ratio is outside the clip range, else 0; its mean is the clip fraction


def clipped_surrogate(
    log_prob_B: Tensor, old_log_prob_B: Tensor, advantage_B: Tensor, clip: float | Tensor
) -> Surrogate:
    """Compute the clipped policy objective of PPO, to be minimized.

    The result contains::

        ratio = pi / pi_old      loss = -min(ratio * A, clamp(ratio, 1 - clip, 1 + clip) * A)
        approx_kl = (ratio - 1) - log ratio

    `clip` can be a tensor (), so that a schedule changes it without recompilation.

    Sources: Schulman et al. 2017, equation 7; Schulman 2020, "Approximating KL divergence" (k3).
    """
    log_ratio_B = log_prob_B - old_log_prob_B
    ratio_B = log_ratio_B.exp()
    loss_B = -torch.minimum(ratio_B * advantage_B, _clamp(ratio_B, 1.0 - clip, 1.0 + clip) * advantage_B)
    with torch.no_grad():
        change_B = ratio_B - 1.0
        return Surrogate(loss_B, ratio_B.detach(), change_B - log_ratio_B, (change_B.abs() > clip).to(change_B.dtype))


@torch.no_grad()
def clipped_surrogate_slope(
    log_prob_B: Tensor, old_log_prob_B: Tensor, advantage_B: Tensor, clip: float | Tensor
) -> Tensor:
    """Compute the derivative of the loss of `clipped_surrogate` with respect to `log_prob_B`, (B,).

    It is -ratio * A, or 0 in clipped rows.
    """
    ratio_B = (log_prob_B - old_log_prob_B).exp_()
    plain_B = ratio_B * advantage_B
    clipped_B = _clamp(ratio_B, 1.0 - clip, 1.0 + clip).mul_(advantage_B)
    return plain_B.masked_fill_(plain_B > clipped_B, 0.0).neg_()


def clipped_value_loss(value_B: Tensor, old_value_B: Tensor, target_B: Tensor, clip: float | Tensor) -> Tensor:
    """Compute half of the squared error of a value, or of the value clipped around the old one if that is larger; (B,).

    The loss is::

        max((v - y)^2, (clamp(v, v_old - clip, v_old + clip) - y)^2) / 2

    `clip` is in units of the value.

    Source: Engstrom et al. 2020 ("Implementation matters in deep policy gradients"), section 3.
    """
    clipped_B = value_B.clamp(old_value_B - clip, old_value_B + clip)
    return 0.5 * torch.maximum((value_B - target_B).square(), (clipped_B - target_B).square())


@torch.no_grad()
def clipped_value_slope(value_B: Tensor, old_value_B: Tensor, target_B: Tensor, clip: float | Tensor) -> Tensor:
    """Compute the derivative of `clipped_value_loss` with respect to `value_B`, (B,).

    It is v - y, or 0 in rows in which the clipped value has the larger error.
    """
    error_B = value_B - target_B
    clipped_B = value_B.clamp(old_value_B - clip, old_value_B + clip).sub_(target_B)
    return error_B.masked_fill_(clipped_B.abs() > error_B.abs(), 0.0)


def huber(error_B: Tensor, delta: float | None = 1.0) -> Tensor:
    """Compute the Huber loss, (B,): `e^2 / 2` if `|e| <= delta`, else `delta * (|e| - delta / 2)`.

    With `delta=None` the loss is `e^2 / 2` everywhere.

    Source: Huber 1964.
    """
    if delta is None:
        return 0.5 * error_B.square()
    size_B = error_B.abs()
    quadratic_B = size_B.clamp(max=delta)
    return quadratic_B * (size_B - 0.5 * quadratic_B)


def log_cosh(error_B: Tensor) -> Tensor:
    """Compute `log(cosh(e))`, (B,): about `e^2 / 2` for small errors and `|e| - log 2` for large ones."""
    size_B = error_B.abs()
    return size_B + torch.nn.functional.softplus(-2.0 * size_B) - math.log(2.0)


def categorical_hinge(score_BC: Tensor, target_B: Tensor) -> Tensor:
    """Compute the hinge loss of classes, (B,): `max(0, 1 + s - t)`.

    t is the score of the target class, and s is the highest score of the other classes. There must be two classes or
    more.

    Source: Crammer & Singer 2001.
    """
    correct_B1 = score_BC.gather(1, target_B[:, None])
    others_BC = score_BC.scatter(1, target_B[:, None], -math.inf)
    return (1.0 + others_BC.amax(1) - correct_B1[:, 0]).clamp(min=0.0)


def expectile(error_B: Tensor, tau: float) -> Tensor:
    """Compute the expectile loss `|tau - [e < 0]| * e^2` with e = target - prediction; (B,). tau = 1/2: half of e^2.

    Its minimizer is the expectile `tau` of the targets: their mean for 1/2, approaching their maximum toward 1.

    Source: Kostrikov et al. 2022 (IQL), equation 5; Newey & Powell 1987.
    """
    return torch.where(error_B < 0.0, 1.0 - tau, tau) * error_B.square()


def quantile_huber(quantile_BQ: Tensor, tau_Q: Tensor, target_BS: Tensor, kappa: float = 1.0) -> Tensor:
    """Compute the quantile Huber loss between quantiles and samples of a target, (B,).

    The loss is summed over quantiles i and averaged over samples j::

        e_ij = target_j - quantile_i      |tau_i - [e_ij < 0]| * huber(e_ij, kappa) / kappa

    `tau_Q` (Q,) or (B, Q) holds the quantile levels, in (0, 1). The target should carry no gradient.

    Sources: Dabney et al. 2018 (QR-DQN), equation 10, and (IQN), equation 3, which divides by kappa.
    """
    error_BQS = target_BS.unsqueeze(-2) - quantile_BQ.unsqueeze(-1)
    weight_BQS = (tau_Q.unsqueeze(-1) - (error_BQS.detach() < 0.0).to(error_BQS.dtype)).abs()
    return (weight_BQS * huber(error_BQS, kappa)).mean(-1).sum(-1) / kappa


def _clamp(x: Tensor, low: Any, high: Any) -> Tensor:
    """Call `torch.clamp`, whose signatures do not accept both numbers and tensors as bounds."""
    return x.clamp(low, high)
