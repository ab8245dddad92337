"""Truncated quantile critics.

Shapes: K critics, B rows of a batch, Q quantiles of a critic, S samples of a target.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rein.agents.base.learner import Batch
from rein.agents.base.soft_actor_critic import ContinuousSoftActorCritic, mean_actor_loss
from rein.networks.encoder import Features
from rein.networks.off_policy import ContinuousNetworks, Critics
from rein.networks.q_networks import even_levels
from rein.ops.return_distributions import smallest_quantiles, sorted_quantile_huber
from rein.ops.values import td_target
from rein.options import at_least_two, not_below_zero, option
from rein.replay.replay import Sample


class TQC(ContinuousSoftActorCritic):
    """Truncated quantile critics (Kuznetsov et al. 2020): SAC with distributions of returns instead of their means.

    Targets and losses::

        y_i  = r + gamma * (z_i - alpha * log pi(a' | s')),  a' ~ pi(s'),  or r at a terminal state
        L_Q  = mean over critics, quantiles and y_i of the quantile Huber loss
        L_pi = mean (alpha * log pi(a | s) - mean of all quantiles at (s, a)),  a ~ pi(s)

    z_i are the quantiles of all target critics at (s', a'), without the largest `dropped_quantiles` per critic. The
    more are dropped, the less the critics overestimate. The temperature alpha is learned as in SAC. Priorities are
    differences between the means of the targets and of the quantiles.

    Observations are flattened. The entry `critic_observation` of a Dict observation is an input of the critics only.
    The action space must be a Box with finite bounds.
    """

    critics: int = option(default=5)
    quantiles: int = option(default=25, check=at_least_two, fixed=True, help="quantiles that each critic learns")
    dropped_quantiles: int = option(
        default=2,
        check=not_below_zero,
        fixed=True,
        help="largest quantiles per critic that are left out of the target; more reduce overestimation",
    )

    def build_networks(self, generator: torch.Generator) -> ContinuousNetworks:
        """Build the actor, critics, target critics, temperature and their learners."""
        if self.dropped_quantiles >= self.quantiles:
            raise ValueError(
                f"TQC(dropped_quantiles={self.dropped_quantiles}): give less than quantiles={self.quantiles}"
            )
        losses: Any = {"actor_loss": mean_actor_loss, "critic_loss": quantile_critic_loss}
        return self.soft_networks(generator, **losses, outputs=self.quantiles)

    @torch.no_grad()
    def next_values(self, next_features: Features, noise_BA: Tensor, alpha: Tensor) -> Tensor:
        """Return samples (B, S) of the values of next observations, in ascending order."""
        action_BA, log_prob_B = self.next_actions(next_features, noise_BA)
        quantile_KBQ = self.networks.target_critics(next_features, action_BA)
        return smallest_quantiles(quantile_KBQ, self.dropped_quantiles) - (alpha * log_prob_B).unsqueeze(1)

    def target(self, sample: Sample, next_value_B: Tensor) -> Tensor:
        """Return samples (B, S) of the one-step targets."""
        gamma = sample.discount
        discount = gamma.unsqueeze(1) if isinstance(gamma, Tensor) else gamma
        return td_target(sample.reward.unsqueeze(1), sample.terminated.unsqueeze(1), next_value_B, discount)


def quantile_critic_loss(
    critics: Critics, batch: Batch, coefficients: None, *, report: bool = True
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the quantile Huber loss with kappa = 1, averaged over critics and quantiles.

    The metrics contain the mean absolute error of the mean of each row as `td_error` (B,).

    Source: Kuznetsov et al. 2020, equation 12.
    """
    quantile_KBQ = critics(batch.features, batch.action)
    levels = even_levels(quantile_KBQ.shape[-1], quantile_KBQ.device)
    loss_B = sorted_quantile_huber(quantile_KBQ, levels, batch.target).mean(0) / len(levels)
    loss = (loss_B if batch.weight is None else loss_B * batch.weight).mean()
    with torch.no_grad():
        metrics = {"td_error": (batch.target.mean(1) - quantile_KBQ.mean(2)).abs().mean(0)}
        if report:
            metrics |= {"critic_loss": loss.detach(), "action_value": quantile_KBQ.mean()}
    return loss, metrics
