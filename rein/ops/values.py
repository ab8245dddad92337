"""Targets of value functions: one-step targets, n-step returns of sampled windows, tabular updates, target networks.

Shapes: B rows, windows or sequences, n steps of a window, T steps of a sequence, A actions.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


def td_target(reward_N: Tensor, terminated_N: Tensor, next_value_N: Tensor, gamma: float | Tensor) -> Tensor:
    """Compute the one-step target of a value, (N,).

    The target is::

        y = r + gamma * v(s')   and   y = r if the task terminated at s'

    A truncated row bootstraps like any other, because the task did not end. `next_value_N` of a terminated row is
    ignored and may be NaN.

    Source: Sutton & Barto 2018, 6.1.
    """
    next_value_N = next_value_N.masked_fill(terminated_N, 0.0)
    if isinstance(gamma, Tensor):  # (N,)
        return torch.addcmul(reward_N, next_value_N, gamma)
    return torch.add(reward_N, next_value_N, alpha=gamma)


def rescale(value: Tensor, epsilon: float = 1e-3) -> Tensor:
    """Compute sign(x) (sqrt(|x| + 1) - 1) + epsilon x, which compresses large values. `unscale` is the inverse.

    Source: Pohlen et al. 2018 ("Observe and look further"), section 3.2.
    """
    return value.sign() * ((value.abs() + 1.0).sqrt() - 1.0) + epsilon * value


def unscale(value: Tensor, epsilon: float = 1e-3) -> Tensor:
    """Compute the inverse of `rescale`.

    It is sign(x) (((sqrt(1 + 4 epsilon (|x| + 1 + epsilon)) - 1) / (2 epsilon))^2 - 1), written without a difference of
    almost equal numbers.
    """
    size = value.abs() + (1.0 + epsilon)
    root = 2.0 * size / (1.0 + (1.0 + 4.0 * epsilon * size).sqrt())
    return value.sign() * (root.square() - 1.0)


def sequence_targets(
    reward_TB: Tensor, terminated_TB: Tensor, valid_TB: Tensor, next_value_TB: Tensor, gamma: float, n_step: int
) -> Tensor:
    """Compute n-step targets of the steps of sequences within one episode, (T, B).

    The targets are::

        y_t = r_t + gamma r_t+1 + ... + gamma^(k-1) r_t+k-1 + gamma^k v_t+k

    k = n, or fewer steps at the end of the valid steps. `next_value_TB` holds v_t+1. It is ignored in terminated rows.
    """
    single_TB = target_TB = td_target(reward_TB, terminated_TB, next_value_TB, gamma)
    for _ in range(n_step - 1):
        further_TB = torch.where(valid_TB[1:], reward_TB[:-1] + gamma * target_TB[1:], single_TB[:-1])
        target_TB = torch.cat((further_TB, single_TB[-1:]))
    return target_TB


def sequence_priority(error_TB: Tensor, valid_TB: Tensor, eta: float = 0.9) -> Tensor:
    """Return eta times the largest plus 1 - eta times the mean absolute error of the valid steps, (B,).

    Source: Kapturowski et al. 2019 (R2D2), section 2.3.
    """
    size_TB = torch.where(valid_TB, error_TB.abs(), 0.0)
    return eta * size_TB.amax(0) + (1.0 - eta) * size_TB.sum(0) / valid_TB.sum(0).clamp(min=1)


def share_of_duplicates(learning_rate: float, rows: int, device: torch.device | str) -> Tensor:
    """Return the weight of each of n duplicates in a step of `step_toward_`, for n from 0 to `rows`; (rows + 1,).

    The weight is share(n) = (1 - (1 - learning_rate)^n) / n, with share(0) = 0.
    """
    n = torch.arange(rows + 1, dtype=torch.float64, device="cpu")
    share = (1.0 - (1.0 - learning_rate) ** n) / n.clamp(min=1.0)
    return share.to(device, torch.float32)


def step_toward_(
    value_C: Tensor, index_N: Tensor, target_N: Tensor, valid_N: Tensor, share: Tensor, count_C: Tensor
) -> Tensor:
    """Move cells of a table toward the targets of a batch, in place. Returns the errors (N,), 0 in invalid rows.

    For the n valid rows of one cell::

        v <- v + (1 - (1 - learning_rate)^n) * mean(target - v)

    This equals n successive steps if the targets agree, and never overshoots the targets otherwise. `share` is
    `share_of_duplicates(learning_rate, N or more)`. `count_C` (C,) int64 is scratch memory, zero before and after, so
    that the cost is O(N) for a table of any size.

    Source: Sutton & Barto 2018, 2.5 (the weight of n steps of constant size).
    """
    count_C.index_add_(0, index_N, valid_N.long())
    share_N = share.index_select(0, count_C.index_select(0, index_N))
    count_C.index_fill_(0, index_N, 0)
    error_N = (target_N - value_C.index_select(0, index_N)).masked_fill_(~valid_N, 0.0)
    # The order of a sum decides its last bit; each device has one call with a fixed order.
    if value_C.is_cuda:
        value_C.index_put_((index_N,), share_N * error_N, accumulate=True)
    else:
        value_C.index_add_(0, index_N, share_N * error_N)
    return error_N


def nonempty_mask(mask_BA: Tensor) -> Tensor:
    """Return a boolean mask that allows every action in rows without a valid action, such as final observations."""
    return mask_BA | ~mask_BA.any(-1, keepdim=True)


def mask_values(value_BA: Tensor, mask_BA: Tensor | None) -> Tensor:
    """Replace the values of invalid actions by a finite number below all others, for `argmax` and `amax`; (B, A).

    A row without a valid action, such as the final observation of an episode, is unchanged. If `mask_BA` is None, all
    actions are valid.

    Source: Huang & Ontanon 2022 ("A closer look at invalid action masking in policy gradient algorithms"), for logits.
    """
    if mask_BA is None:
        return value_BA
    lowest = torch.finfo(value_BA.dtype).min / 2  # half, so that sums do not overflow
    return value_BA.masked_fill(~nonempty_mask(mask_BA), lowest)


class NStep(NamedTuple):
    """Result of `n_step`. The target of a value is `return_ + discount * v(s')`, with s' after row `last`."""

    return_: Tensor  # (B,) sum of discounted rewards up to the end of the window
    discount: Tensor  # (B,) gamma ** steps, or 0 if the task terminated
    last: Tensor  # (B,) int64 in 0 to n - 1: the row whose next_observation is s'
    steps: Tensor  # (B,) int64 in 0 to n: number of rewards in the sum; 0 if the first row is invalid
    terminated: Tensor  # (B,) bool: whether the task terminated in the window


@torch.no_grad()
def n_step(
    reward_nB: Tensor, terminated_nB: Tensor, truncated_nB: Tensor, valid_nB: Tensor | None = None, *, gamma: float
) -> NStep:
    """Compute the discounted rewards of windows of n rows, each up to its first end.

    The returns are::

        R = r_0 + gamma * r_1 + ... + gamma^(k-1) * r_k-1        k = n, or up to and including the first end

    A window ends after a row that is terminated or truncated, before a row that is not `valid_nB`, or after n rows.
    Rows after the end are ignored and may contain NaN. If the first row is invalid, return and discount are 0.

    Source: Sutton & Barto 2018, 7.1.
    """
    ended_nB = terminated_nB | truncated_nB
    counts_nB = torch.ones_like(ended_nB)
    counts_nB[1:] = ~ended_nB[:-1]
    if valid_nB is not None:
        counts_nB &= valid_nB
    counts_nB = counts_nB.cumprod(0).bool()  # prefix of each window
    steps_B = counts_nB.sum(0)
    last_B = (steps_B - 1).clamp(min=0)
    power_n1 = gamma ** torch.arange(len(reward_nB), dtype=torch.float64, device=reward_nB.device).unsqueeze(-1)
    return_B = (torch.where(counts_nB, reward_nB, 0.0) * power_n1.to(reward_nB.dtype)).sum(0)
    terminated_B = terminated_nB.gather(0, last_B.unsqueeze(0)).squeeze(0) & (steps_B > 0)
    discount_B = (power_n1.view(-1)[last_B] * gamma).to(reward_nB.dtype)
    return NStep(return_B, torch.where(terminated_B | (steps_B == 0), 0.0, discount_B), last_B, steps_B, terminated_B)


@torch.no_grad()
def polyak_(targets: list[Tensor], sources: list[Tensor], tau: float) -> None:
    """Move each target toward its source, in place and in one operation for all.

    The update is::

        target <- target + tau * (source - target)

    `tau` = 1 copies exactly. All tensors must be floating-point; copy counters separately.

    Source: Polyak & Juditsky 1992 (averaging); Lillicrap et al. 2016, algorithm 1 (targets of a critic).

    Raises ValueError for lists of different lengths and for a `tau` outside [0, 1].
    """
    if len(targets) != len(sources):
        raise ValueError(f"polyak_: got {len(targets)} targets for {len(sources)} sources")
    if not 0.0 <= tau <= 1.0:
        raise ValueError(f"polyak_(tau={tau}): give a number from 0 (no change) to 1 (copy)")
    if not targets:
        return
    if tau == 1.0:  # also replaces NaN in the targets
        torch._foreach_copy_(targets, sources)
    else:
        torch._foreach_lerp_(targets, sources, tau)
