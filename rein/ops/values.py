"""Targets of values, and the step toward them.

Shapes: N rows, C cells of a table.
"""

from __future__ import annotations

import torch
from torch import Tensor


def td_target(reward_N: Tensor, terminated_N: Tensor, next_value_N: Tensor, gamma: float | Tensor) -> Tensor:
    """One-step target of a value, (N,).

        y = r + gamma * v(s')   and   y = r where the task terminated at s'

    A truncated row bootstraps like any other: the clock ran out, the task did not end. `next_value_N` of a terminated
    row is never looked at, so it may be anything, even NaN.

    Source: Sutton & Barto 2018, 6.1.
    """
    next_value_N = next_value_N.masked_fill(terminated_N, 0.0)
    if isinstance(gamma, Tensor):  # (N,)
        return torch.addcmul(reward_N, next_value_N, gamma)
    return torch.add(reward_N, next_value_N, alpha=gamma)


def share_of_duplicates(learning_rate: float, rows: int, device: torch.device | str) -> Tensor:
    """What each of n duplicates adds to the step of `step_toward_`, for n from 0 to `rows`; (rows + 1,).

    share(n) = (1 - (1 - learning_rate)^n) / n     and   share(0) = 0
    """
    n = torch.arange(rows + 1, dtype=torch.float64, device="cpu")
    share = (1.0 - (1.0 - learning_rate) ** n) / n.clamp(min=1.0)
    return share.to(device, torch.float32)


def step_toward_(
    value_C: Tensor, index_N: Tensor, target_N: Tensor, valid_N: Tensor, share: Tensor, count_C: Tensor
) -> Tensor:
    """Move cells of a table toward the targets of a batch, in place; returns the errors (N,), 0 where not valid.

        v <- v + (1 - (1 - learning_rate)^n) * mean(target - v)      over the n valid rows of one cell

    That is what n steps one after another do where their targets agree, and it never goes beyond the targets where they
    do not. `share` is `share_of_duplicates(learning_rate, N or more)`. `count_C` (C,) int64 is scratch, zero before and
    after, so the cost is O(N) for a table of any size.

    Source: Sutton & Barto 2018, 2.5 (the weight of n steps of constant size).
    """
    count_C.index_add_(0, index_N, valid_N.long())
    share_N = share.index_select(0, count_C.index_select(0, index_N))
    count_C.index_fill_(0, index_N, 0)
    error_N = (target_N - value_C.index_select(0, index_N)).masked_fill_(~valid_N, 0.0)
    # The order in a sum decides its last bit; each device has one call that keeps to an order.
    if value_C.is_cuda:
        value_C.index_put_((index_N,), share_N * error_N, accumulate=True)
    else:
        value_C.index_add_(0, index_N, share_N * error_N)
    return error_N
