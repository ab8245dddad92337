"""Targets and losses of distributions of returns.

Shapes: K critics, B rows, Q quantiles of a critic, S samples of a target, C quantiles of all critics, Z atoms.
"""

from __future__ import annotations

import torch
from torch import Tensor


def smallest_quantiles(quantile_KBQ: Tensor, dropped: int) -> Tensor:
    """Return the quantiles of K critics together, without the K * `dropped` largest, in ascending order; (B, S).

    S = K * (Q - dropped). Without the largest quantiles, their mean does not overestimate the value.

    Source: Kuznetsov et al. 2020 ("Controlling overestimation bias with truncated mixture of continuous distributional
    quantile critics"), equations 8 to 10.
    """
    critics, _, quantiles = quantile_KBQ.shape
    return quantile_KBQ.transpose(0, 1).flatten(1).sort(1).values[:, : critics * (quantiles - dropped)]


def sorted_quantile_huber(quantile_KBQ: Tensor, tau_Q: Tensor, target_BS: Tensor, kappa: float = 1.0) -> Tensor:
    """Compute `rein.ops.losses.quantile_huber` for targets in ascending order, (K, B), without a value for each pair.

    The targets of a quantile fall into four parts, in which the loss is linear, quadratic, quadratic and linear. The
    sums over a part are differences of running sums of the targets and of their squares, in float64.
    """
    target_BS, quantile_BC = target_BS.detach().double(), quantile_KBQ.double().transpose(0, 1).flatten(1)
    knot_B3C = torch.stack([quantile_BC.detach() + shift for shift in (-kappa, 0.0, kappa)], 1)
    end_B3C = torch.searchsorted(target_BS.contiguous(), knot_B3C.flatten(1)).view_as(knot_B3C)
    first_B1C = torch.zeros_like(end_B3C[:, :1])
    end_B5C = torch.cat((first_B1C, end_B3C, first_B1C + target_BS.shape[1]), 1)

    def sums(value_BS: Tensor) -> Tensor:
        """Return the sums of values over the four parts, (4, B, C)."""
        sum_BS = torch.nn.functional.pad(value_BS.cumsum(1), (1, 0))
        return sum_BS.gather(1, end_B5C.flatten(1)).view_as(end_B5C).diff(dim=1).transpose(0, 1)

    count, total, squares = end_B5C.diff(dim=1).transpose(0, 1), sums(target_BS), sums(target_BS.square())
    square = 0.5 * (squares - 2.0 * quantile_BC * total + count * quantile_BC.square())
    below_BC = kappa * (count[0] * (quantile_BC - 0.5 * kappa) - total[0]) + square[1]
    above_BC = kappa * (total[3] - count[3] * (quantile_BC + 0.5 * kappa)) + square[2]
    loss_BC = torch.lerp(below_BC, above_BC, tau_Q.to(below_BC.dtype).repeat(len(quantile_KBQ)))
    loss_BKQ = loss_BC.unflatten(1, quantile_KBQ.shape[::2]) / (kappa * target_BS.shape[1])
    return loss_BKQ.sum(2).t().to(quantile_KBQ.dtype)


def categorical_target(
    prob_BZ: Tensor, support_Z: Tensor, reward_B: Tensor, terminated_B: Tensor, gamma: float | Tensor
) -> Tensor:
    """Return the probabilities (B, Z) of one-step returns on the atoms of an evenly spaced support.

    Atom z of the next state moves to r + gamma * z, or to r if the task terminated, and is clamped to the support. Its
    probability is divided between the two nearest atoms, in proportion to their closeness. Probabilities in a
    terminated row are ignored and may be NaN.

    Source: Bellemare et al. 2017 ("A distributional perspective on reinforcement learning"), equation 7.
    """
    discount = gamma.unsqueeze(1) if isinstance(gamma, Tensor) else gamma
    ended_B1 = terminated_B.unsqueeze(1)
    moved_BZ = reward_B.unsqueeze(1) + discount * support_Z * ~ended_B1
    moved_BZ = moved_BZ.clamp(support_Z[0], support_Z[-1])
    prob_BZ = prob_BZ.masked_fill(ended_B1, 1.0 / len(support_Z))
    distance_BZZ = (moved_BZ.unsqueeze(1) - support_Z.unsqueeze(1)).abs() / (support_Z[1] - support_Z[0])
    return ((1.0 - distance_BZZ).clamp(min=0.0) * prob_BZ.unsqueeze(1)).sum(2)


def categorical_divergence(log_prob_BZ: Tensor, target_BZ: Tensor) -> Tensor:
    """Compute the KL divergence of predicted probabilities from target probabilities, (B,).

    Its gradient is that of the cross-entropy. The target should carry no gradient.

    Source: Hessel et al. 2018 ("Rainbow"), who use it as loss and as priority.
    """
    return torch.nn.functional.kl_div(log_prob_BZ, target_BZ, reduction="none").sum(-1)
