"""Policy-gradient loss of PPO, A2C and IMPALA.

Shapes: M rows of a minibatch (for sequences, T steps of N environments), K rows of numbers.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from rein.agents.base.learner import Batch
from rein.ops.distributions import Distribution
from rein.ops.losses import clipped_surrogate, clipped_value_loss
from rein.ops.statistics import masked_mean

if TYPE_CHECKING:
    from rein.networks.actor_critic import ActorCritic

METRICS = ("policy_loss", "value_loss", "entropy", "ratio", "approx_kl", "clip_fraction")


class Coefficients(NamedTuple):
    """Weights and clip ranges of `policy_loss`."""

    clip: float | Tensor | None  # clip range of the ratio; None for the plain policy gradient
    value: float | Tensor
    entropy: float | Tensor
    value_clip: float | Tensor | None = None


def policy_loss(
    networks: ActorCritic, batch: Batch, coefficients: Coefficients, *, report: bool = True
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the policy-gradient loss of PPO, A2C and IMPALA. The metrics are those of `report_metrics`.

    The loss is::

        loss = surrogate + c_value * value loss - c_entropy * entropy

    The surrogate is clipped. If the clip range is None, it is -A log pi, whose gradient is the policy gradient (Sutton
    et al. 2000).

    Source: Schulman et al. 2017, equation 9.
    """
    distribution, value_M = networks.look(batch.features, batch.carry, batch.reset)
    log_prob_M = distribution.log_prob(batch.sample)
    surrogate_M, value_loss_M = _surrogate(log_prob_M, batch, coefficients), _value_loss(value_M, batch, coefficients)
    if isinstance(coefficients.value, Tensor):  # alpha= would copy it to the CPU
        loss_M = torch.addcmul(surrogate_M, value_loss_M, coefficients.value)
    else:
        loss_M = torch.add(surrogate_M, value_loss_M, alpha=coefficients.value)
    if isinstance(coefficients.entropy, Tensor) or coefficients.entropy != 0.0:
        loss_M = loss_M - coefficients.entropy * distribution.entropy()
    metrics = report_metrics(distribution, log_prob_M, value_M, batch, coefficients) if report else {}
    return masked_mean(loss_M, batch.valid), metrics


@torch.no_grad()
def report_metrics(
    distribution: Distribution, log_prob_M: Tensor, value_M: Tensor, batch: Batch, coefficients: Coefficients
) -> dict[str, Tensor]:
    """Return the terms of the loss and measures of the change of the policy, as means over valid rows.

    For continuous actions, `log_std` is the log standard deviation, also averaged over dimensions.
    """
    rows = report_rows(distribution, log_prob_M, value_M, batch, coefficients)
    stacked_KM = torch.stack([row.float() for row in rows.values()])  # one mean instead of six
    return dict(zip(rows, _means(stacked_KM, batch.valid).unbind(), strict=True))


def report_rows(
    distribution: Distribution, log_prob_M: Tensor, value_M: Tensor, batch: Batch, coefficients: Coefficients
) -> dict[str, Tensor]:
    """Return the values of `report_metrics` for each row, (M,) each. All tensors may have further leading axes."""
    clip = math.inf if coefficients.clip is None else coefficients.clip
    moved = clipped_surrogate(log_prob_M, batch.log_prob, batch.advantage, clip)
    losses = _surrogate(log_prob_M, batch, coefficients), _value_loss(value_M, batch, coefficients)
    found = (*losses, distribution.entropy(), moved.ratio, moved.approx_kl, moved.clipped)
    rows: dict[str, Tensor] = dict(zip(METRICS, found, strict=True))
    if (log_std := getattr(distribution, "log_std", None)) is not None:  # (A,), or (M, A) if it depends on the state
        rows["log_std"] = log_std.mean(-1).expand_as(log_prob_M)
    return rows


def _surrogate(log_prob_M: Tensor, batch: Batch, coefficients: Coefficients) -> Tensor:
    if coefficients.clip is None:
        return -batch.advantage * log_prob_M
    return clipped_surrogate(log_prob_M, batch.log_prob, batch.advantage, coefficients.clip).loss


def _value_loss(value_M: Tensor, batch: Batch, coefficients: Coefficients) -> Tensor:
    if coefficients.value_clip is None:
        return (value_M - batch.target).square().mul(0.5)
    return clipped_value_loss(value_M, batch.value, batch.target, coefficients.value_clip)


def _means(x_KM: Tensor, valid_M: Tensor | None) -> Tensor:
    """Return `masked_mean` of each of K rows, (K,)."""
    if valid_M is None:
        return x_KM.flatten(1).mean(1)
    return torch.where(valid_M, x_KM, 0.0).flatten(1).sum(1) / valid_M.sum().clamp(min=1)
