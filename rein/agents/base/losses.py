"""Losses that several off-policy algorithms share: critics, temperature, likelihood of recorded actions.

Losses of a single algorithm are in its module.

Shapes: K critics, B rows.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rein.agents.base.learner import Batch

if TYPE_CHECKING:
    from rein.networks.off_policy import Actor, Critics


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
