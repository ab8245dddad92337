"""Returns, advantages and targets along time, for all environments at once. Results carry no gradient.

Row (t, n) is one transition: `reward_TN` is r_t, and `next_value_TN` is the value v(s_t+1) of the true next
observation: the final one if the episode ended. A trace ends, so that later rows have no influence, at:

- a row that is `terminated_TN`: the value beyond is 0. The row's next value is ignored and may be NaN.
- a row that is `truncated_TN` (time limit): the row bootstraps from its next value.
- a row that is not `valid_TN`: it is not a transition, for example a reset or a step after the end of an episode. Its
  results are 0 whatever it contains. The row before it bootstraps from its own next value unless it terminated.
  `valid_TN=None` means that all rows are valid.
- the last row: it bootstraps from its own next value unless it terminated.

Below, `continues_t` is 1 if the trace continues from row t to row t + 1, else 0. v(s_t+1) is 0 if row t terminated.

Shapes: T steps in time, N environments. All arguments may have further dimensions.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class VTrace(NamedTuple):
    """Result of `vtrace`."""

    target: Tensor  # (T, N) target of the value of s_t
    advantage: Tensor  # (T, N) weight of the policy gradient at (s_t, a_t)


@torch.no_grad()
def smooth_rewards(
    reward_TN: Tensor,
    terminated_TN: Tensor,
    truncated_TN: Tensor,
    valid_TN: Tensor | None = None,
    *,
    decay: float,
) -> Tensor:
    """Add discounted future rewards to each reward, (T, N). A decay of 0 returns the rewards unchanged.

    The smoothed rewards are::

        s_t = r_t + decay * continues_t * s_t+1

    This changes the return: a reward counts several times in the discounted sum, more often if it comes later.
    """
    continues_TN = _continues(terminated_TN, truncated_TN, valid_TN, reward_TN.dtype)
    return _accumulate_(_zero_where_invalid(reward_TN, valid_TN).clone(), continues_TN, decay)


@torch.no_grad()
def discounted_returns(
    reward_TN: Tensor,
    terminated_TN: Tensor,
    truncated_TN: Tensor,
    next_value_TN: Tensor,
    valid_TN: Tensor | None = None,
    *,
    gamma: float,
) -> Tensor:
    """Compute discounted returns up to the end of the trace, with bootstrapping; (T, N).

    The returns are::

        G_t = r_t + gamma * G_t+1      and      G_t = r_t + gamma * v(s_t+1)  where the trace ends

    Source: Sutton & Barto 2018, 3.3 and 3.4.
    """
    return lambda_returns(reward_TN, terminated_TN, truncated_TN, next_value_TN, valid_TN, gamma=gamma, lambda_=1.0)


@torch.no_grad()
def n_step_returns(
    reward_TN: Tensor,
    terminated_TN: Tensor,
    truncated_TN: Tensor,
    next_value_TN: Tensor,
    valid_TN: Tensor | None = None,
    *,
    gamma: float,
    n: int,
) -> Tensor:
    """Compute n-step returns, with fewer steps if the trace ends earlier, and bootstrapping; (T, N).

    The returns are::

        G_t = r_t + gamma * r_t+1 + ... + gamma^(m-1) * r_t+m-1 + gamma^m * v(s_t+m)      m = n, or up to the end

    n = 1 gives `td_target`; n >= T gives `discounted_returns`. Raises ValueError for n < 1.

    Source: Sutton & Barto 2018, 7.1.
    """
    if n < 1:
        raise ValueError(f"n_step_returns(n={n}): n must be at least 1")
    continues_TN = _continues(terminated_TN, truncated_TN, valid_TN, reward_TN.dtype)
    ahead_TN = _one_step(reward_TN, terminated_TN, next_value_TN, valid_TN, gamma)
    at_end_TN = _one_step(reward_TN, terminated_TN, next_value_TN * (1.0 - continues_TN), valid_TN, gamma)
    for _ in range(min(n, len(reward_TN)) - 1):  # each pass extends every return by one row
        further_TN = at_end_TN.clone()
        further_TN[:-1].addcmul_(continues_TN[:-1], ahead_TN[1:], value=gamma)
        ahead_TN = further_TN
    return ahead_TN


@torch.no_grad()
def lambda_returns(
    reward_TN: Tensor,
    terminated_TN: Tensor,
    truncated_TN: Tensor,
    next_value_TN: Tensor,
    valid_TN: Tensor | None = None,
    *,
    gamma: float,
    lambda_: float,
) -> Tensor:
    """Compute lambda-returns: the mean of all n-step returns with weights (1 - lambda) * lambda^(n-1); (T, N).

    The returns are::

        G_t = r_t + gamma * ((1 - lambda) * v(s_t+1) + lambda * G_t+1)
        G_t = r_t + gamma * v(s_t+1)                                      where the trace ends

    Source: Sutton & Barto 2018, 12.1; equation 12.18.
    """
    continues_TN = _continues(terminated_TN, truncated_TN, valid_TN, reward_TN.dtype)
    bootstrap_TN = next_value_TN * torch.rsub(continues_TN, 1.0, alpha=lambda_)
    return_TN = _one_step(reward_TN, terminated_TN, bootstrap_TN, valid_TN, gamma)
    return _accumulate_(return_TN, continues_TN, gamma * lambda_)


@torch.no_grad()
def gae(
    reward_TN: Tensor,
    terminated_TN: Tensor,
    truncated_TN: Tensor,
    value_TN: Tensor,
    next_value_TN: Tensor,
    valid_TN: Tensor | None = None,
    *,
    gamma: float | Tensor,
    lambda_: float | Tensor,
) -> Tensor:
    """Compute generalized advantage estimates, (T, N). `advantage_TN + value_TN` is the target of the value.

    `gamma` and `lambda_` can be tensors (N,), with a number for each environment.

    The advantages are::

        delta_t = r_t + gamma * v(s_t+1) - v(s_t)
        A_t     = delta_t + gamma * lambda * continues_t * A_t+1

    Source: Schulman et al. 2016, equations 11 to 16.
    """
    delta_TN = _delta(reward_TN, terminated_TN, value_TN, next_value_TN, valid_TN, gamma)
    continues_TN = _continues(terminated_TN, truncated_TN, valid_TN, reward_TN.dtype)
    return _accumulate_(delta_TN, continues_TN, gamma * lambda_)


@torch.no_grad()
def vtrace(
    log_ratio_TN: Tensor,
    reward_TN: Tensor,
    terminated_TN: Tensor,
    truncated_TN: Tensor,
    value_TN: Tensor,
    next_value_TN: Tensor,
    valid_TN: Tensor | None = None,
    *,
    gamma: float,
    lambda_: float = 1.0,
    rho_clip: float = 1.0,
    c_clip: float = 1.0,
) -> VTrace:
    """Compute V-trace targets and advantages of a policy pi from data of a policy mu.

    `log_ratio_TN` is log pi - log mu. The results are::

        rho_t   = min(rho_clip, pi / mu)      c_t = lambda * min(c_clip, pi / mu)
        delta_t = rho_t * (r_t + gamma * v(s_t+1) - v(s_t))
        D_t     = delta_t + gamma * c_t * continues_t * D_t+1
        target_t    = v(s_t) + D_t
        advantage_t = delta_t + rho_t * gamma * lambda * continues_t * D_t+1

    With lambda = 1 the advantage is the paper's rho_t * (r_t + gamma * target_t+1 - v(s_t)). On data of pi, with clips
    of 1 or more, it equals `gae` for any lambda. `math.inf` disables a clip.

    Source: Espeholt et al. 2018, equation 1 and section 4.2; lambda as in its remark 2.
    """
    if valid_TN is not None:
        log_ratio_TN = torch.where(valid_TN, log_ratio_TN, 0.0)
    ratio_TN = log_ratio_TN.exp()
    rho_TN = ratio_TN.clamp(max=rho_clip)
    continues_TN = _continues(terminated_TN, truncated_TN, valid_TN, reward_TN.dtype)
    delta_TN = _delta(reward_TN, terminated_TN, value_TN, next_value_TN, valid_TN, gamma).mul_(rho_TN)
    trace_TN = ratio_TN.clamp_(max=c_clip).mul_(continues_TN)
    correction_TN = _accumulate_(delta_TN.clone(), trace_TN, gamma * lambda_)
    delta_TN[:-1].addcmul_(rho_TN.mul_(continues_TN)[:-1], correction_TN[1:], value=gamma * lambda_)
    return VTrace(_zero_where_invalid(correction_TN.add_(value_TN), valid_TN), delta_TN)


def _continues(terminated_TN: Tensor, truncated_TN: Tensor, valid_TN: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Return 1 if the trace continues from a row to the next one, else 0; (T, N)."""
    # converting bool directly to float is six times slower
    continues_TN = (~(terminated_TN | truncated_TN)).to(torch.uint8)
    if valid_TN is not None:
        continues_TN &= valid_TN
        continues_TN[:-1] &= valid_TN[1:]
    continues_TN[-1:] = 0
    return continues_TN.to(dtype)


def _one_step(
    reward_TN: Tensor, terminated_TN: Tensor, next_value_TN: Tensor, valid_TN: Tensor | None, gamma: float | Tensor
) -> Tensor:
    """Return r_t + gamma * v(s_t+1) in new memory."""
    target_TN = torch.where(terminated_TN, 0.0, next_value_TN).mul_(gamma).add_(reward_TN)
    return _zero_where_invalid(target_TN, valid_TN)


def _delta(
    reward_TN: Tensor,
    terminated_TN: Tensor,
    value_TN: Tensor,
    next_value_TN: Tensor,
    valid_TN: Tensor | None,
    gamma: float | Tensor,
) -> Tensor:
    """Return r_t + gamma * v(s_t+1) - v(s_t) in new memory."""
    delta_TN = _one_step(reward_TN, terminated_TN, next_value_TN, None, gamma).sub_(value_TN)
    return _zero_where_invalid(delta_TN, valid_TN)


def _zero_where_invalid(x_TN: Tensor, valid_TN: Tensor | None) -> Tensor:
    """Set invalid rows to 0. A product with 0 would keep NaN."""
    return x_TN if valid_TN is None else torch.where(valid_TN, x_TN, 0.0)


def _accumulate_(x_TN: Tensor, trace_TN: Tensor, discount: float | Tensor) -> Tensor:
    """Compute x_t <- x_t + discount * trace_t * x_t+1 in place, from the last row to the first.

    The loop has a single operation per row of N elements, which fit into the first-level cache.
    """
    if isinstance(discount, Tensor):
        trace_TN, discount = trace_TN * discount, 1.0
    x_N, trace_N = x_TN.unbind(), trace_TN.unbind()
    for t in range(len(x_N) - 2, -1, -1):
        x_N[t].addcmul_(trace_N[t], x_N[t + 1], value=discount)
    return x_TN
