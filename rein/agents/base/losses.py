"""Losses that several algorithms share: policy gradient, critics, temperature, likelihood of recorded actions.

Losses of a single algorithm are in its module. `rein.agents.base.closed_form` has faster gradients for some losses.

Shapes: K critics, B rows, M rows of a minibatch (for sequences, T steps of N environments).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rein.agents.base.learner import Batch
from rein.networks.actor_critic import Actor, ActorCritic, Critics
from rein.ops.distributions import Distribution
from rein.ops.losses import clipped_surrogate, clipped_value_loss
from rein.ops.statistics import masked_mean

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


def critic_loss(
    critics: Critics, batch: Batch, coefficients: None, *, report: bool = True
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute half the mean squared error, summed over critics.

    The metrics contain the mean absolute error of each row as `td_error` (B,).
    """
    return squared_errors(critics(batch.features, batch.action), batch, report)


def squared_errors(value_KB: Tensor, batch: Batch, report: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute `critic_loss` from the values of the recorded actions."""
    error_KB = value_KB - batch.target
    square_KB = error_KB.square()
    loss = (square_KB if batch.weight is None else square_KB * batch.weight).sum() * (0.5 / batch.size)
    with torch.no_grad():
        metrics = {"td_error": error_KB.abs().mean(0)}
        if report:
            metrics |= {"critic_loss": loss.detach(), "action_value": value_KB.mean()}
    return loss, metrics


class Temperature(nn.Module):
    """Logarithm of the entropy weight alpha, as a parameter."""

    def __init__(self, initial: float, device: torch.device) -> None:
        super().__init__()
        self.log = nn.Parameter(torch.full((), math.log(initial), dtype=torch.float32, device=device))


def check_learned(agent: object, temperature: float | None, learning_rate: Any) -> None:
    """Raise ValueError if a fixed temperature has a learning rate."""
    if temperature is not None and learning_rate is not None:
        raise ValueError(
            f"{type(agent).__name__}(temperature={temperature:g}, temperature_learning_rate={learning_rate!r}): "
            "a fixed temperature is not learned; give only one of the two options"
        )


def temperature_loss(
    temperature: Temperature, batch: Batch, target_entropy: float, *, report: bool = True
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute mean -log alpha * (log pi + target_entropy). Alpha increases while the entropy is below its target.

    Source: Haarnoja et al. 2018 ("Soft actor-critic algorithms and applications"), equation 18, with log alpha.
    """
    return -temperature.log * (batch.log_prob.mean() + target_entropy), {}


WITHIN = 0.999  # actions are clamped to this before their density is computed, which is unbounded at the bounds
LEAST_LOG_STD = -5.0  # lower bound of log std; data of a deterministic policy would decrease it without limit


def likelihood_loss(
    actor: Actor, batch: Batch, coefficients: None, *, report: bool = True
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute mean -w log pi(a | s) of a squashed Gaussian.

    The density of a squashed Gaussian is unbounded at the bounds, so recorded actions are clamped to [-0.999, 0.999].
    The metrics contain `|tanh(mean) - a|^2` of each row as `error` (B,). -log pi is not a useful error, since it is
    negative for rows that are learned well.

    Sources: Pomerleau 1988 for w = 1; Peters & Schaal 2007 and Nair et al. 2020 (AWAC), equation 13, for other weights.
    """
    distribution = actor.distribution(batch.features)
    distribution = distribution._replace(log_std=distribution.log_std.clamp(min=LEAST_LOG_STD))
    loss_B = -distribution.log_prob(batch.action.clamp(-WITHIN, WITHIN).atanh())
    error_B = (distribution.mean.detach().tanh() - batch.action).square().sum(1)
    return weighted_mean(loss_B, error_B, batch.weight, report)


def weighted_mean(
    loss_B: Tensor, error_B: Tensor, weight_B: Tensor | None, report: bool
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the weighted mean loss, with `error` (B,) and, if `report` is set, `actor_loss`."""
    loss = (loss_B if weight_B is None else loss_B * weight_B).mean()
    metrics = {"error": error_B.detach()}
    return loss, metrics | {"actor_loss": loss.detach()} if report else metrics
