"""Imitation of recorded actions: likelihood losses, and the base class of AWAC and IQL.

Shapes: B rows, A action dimensions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from rein.agents.base.actor_and_critics import ActorAndCritics, ContinuousActions
from rein.agents.base.learner import Batch
from rein.options import above_zero, option

if TYPE_CHECKING:
    from rein.networks.off_policy import Actor

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


class ImitatingAgent(ContinuousActions, ActorAndCritics):
    """Base class of AWAC and IQL: imitates recorded actions, weighted by their advantage."""

    learning_starts: int = option(default=0)
    critics: int = option(default=2)
    max_weight: float = option(
        default=100.0, check=above_zero, fixed=True, help="largest weight of an action in the actor loss"
    )

    def imitate(self, batch: Batch, advantage_B: Tensor, imitation_B: Tensor, report: bool) -> dict[str, Tensor]:
        """Update the actor with the weights `imitation_B` (B,), clamped in place, times the weights of the batch."""
        imitation_B = imitation_B.clamp_(max=self.max_weight)
        weight_B = imitation_B if batch.weight is None else imitation_B * batch.weight
        metrics = self._actor.step(batch._replace(weight=weight_B), None, report=report)
        del metrics["error"]
        if report:
            metrics |= {"advantage": advantage_B.mean(), "largest_weight": imitation_B.amax()}
        return metrics
