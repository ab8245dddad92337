"""Returns of windows that were drawn from a buffer: a few consecutive rows each, to bootstrap after the last of them.

Shapes: n steps of a window, B windows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class NStep(NamedTuple):
    """What `n_step` returns; the target of a value is `return_ + discount * v(s')`, s' after row `last`."""

    return_: Tensor  # (B,) sum of discounted rewards up to the window's end
    discount: Tensor  # (B,) gamma ** steps, and 0 where the task terminated: there is nothing to bootstrap from
    last: Tensor  # (B,) int64, from 0 to n - 1: the row whose next_observation is s'
    steps: Tensor  # (B,) int64, from 1 to n: rewards in the sum; 0 where not even the first row is valid
    terminated: Tensor  # (B,) bool: whether the window ends with the task


@torch.no_grad()
def n_step(
    reward_nB: Tensor, terminated_nB: Tensor, truncated_nB: Tensor, valid_nB: Tensor | None = None, *, gamma: float
) -> NStep:
    """The discounted rewards of windows of n rows, each up to its first end.

        R = r_0 + gamma * r_1 + ... + gamma^(k-1) * r_k-1        k = n, or up to the first end, that row with it

    A window ends with a row that is terminated or truncated, before a row that is not `valid_nB`, or after n rows. What
    stands in rows after the end may be anything, even NaN. A window whose first row is not valid is no data: its return
    and its discount are 0.

    Source: Sutton & Barto 2018, 7.1.
    """
    ended_nB = terminated_nB | truncated_nB
    counts_nB = torch.ones_like(ended_nB)
    counts_nB[1:] = ~ended_nB[:-1]
    if valid_nB is not None:
        counts_nB &= valid_nB
    counts_nB = counts_nB.cumprod(0).bool()  # a prefix of each window
    steps_B = counts_nB.sum(0)
    last_B = (steps_B - 1).clamp(min=0)
    power_n1 = gamma ** torch.arange(len(reward_nB), dtype=torch.float64, device=reward_nB.device).unsqueeze(-1)
    return_B = (torch.where(counts_nB, reward_nB, 0.0) * power_n1.to(reward_nB.dtype)).sum(0)
    terminated_B = terminated_nB.gather(0, last_B.unsqueeze(0)).squeeze(0) & (steps_B > 0)
    discount_B = (power_n1.view(-1)[last_B] * gamma).to(reward_nB.dtype)
    return NStep(return_B, torch.where(terminated_B | (steps_B == 0), 0.0, discount_B), last_B, steps_B, terminated_B)
