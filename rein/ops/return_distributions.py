"""Targets and losses of distributions of returns.

Shapes: K critics, B rows, Q quantiles of a critic, S samples of a target, C quantiles of all critics.
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
