"""Likelihood of recorded actions: loss of BC, AWAC and IQL.

Shapes: B rows.
"""

from __future__ import annotations

from torch import Tensor

from rein.agents.base.learner import Batch
from rein.networks.actor_critic import Actor

WITHIN = 0.999  # largest action whose density is computed: the density is unbounded at the bounds
LEAST_LOG_STD = -5.0  # lower bound in the likelihood: data of a deterministic policy would decrease it forever


def likelihood_loss(
    actor: Actor, batch: Batch, coefficients: None, *, report: bool = True
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute mean -w log pi(a | s) of a squashed Gaussian; reports |tanh(mean) - a|^2 of each row as `error` (B,).

    The density of a squashed Gaussian is unbounded at the bounds, so recorded actions are kept a thousandth away from
    them. -log pi is not used as error, since it is negative for rows that are learned well.

    Sources: Pomerleau 1988 for w = 1; Peters & Schaal 2007, Nair et al. 2020 (AWAC), equation 13, for others.
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
