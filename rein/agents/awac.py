"""Advantage-weighted actor-critic.

Shapes: K critics, N environments, B rows of a batch, A action dimensions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rein.agents.base.imitation import ImitatingAgent, likelihood_loss
from rein.agents.base.learner import Batch
from rein.networks.encoder import Features
from rein.networks.off_policy import ContinuousNetworks
from rein.options import above_zero, one_of, option
from rein.replay.replay import Sample


class AWAC(ImitatingAgent):
    """Advantage-weighted actor-critic (Nair et al. 2020): imitates recorded actions, weighted by their advantage.

    Targets and losses::

        y    = r + gamma * min_k Q'_k(s', a'),  a' ~ pi(s'),  or r at a terminal state
        L_Q  = sum_k mean (Q_k(s, a) - y)^2 / 2
        A    = min_k Q_k(s, a) - min_k Q_k(s, b),  b ~ pi(s)
        L_pi = mean -w log pi(a | s),  w = exp(A / temperature), or B times the batch's softmax of A / temperature

    With `prioritized`, importance weights apply to both losses. `rein.offline_loop` trains AWAC on recorded data, and
    `rein.training_loop` continues in environments.

    Observations are flattened. The entry `critic_observation` of a Dict observation is an input of the critics only.
    The action space must be a Box with finite bounds.
    """

    temperature: float = option(
        default=1.0,
        check=above_zero,
        fixed=True,
        help="temperature of the weights exp(advantage / temperature), in units of the return",
    )
    weights: str = option(
        default="softmax",
        check=one_of("softmax", "exp"),
        fixed=True,
        help='"softmax" scales the weights to a mean of 1 over the batch, "exp" does not',
    )

    reports = ("critic_loss", "action_value", "actor_loss", "advantage", "largest_weight", "grad_norm")

    def build_networks(self, generator: torch.Generator) -> ContinuousNetworks:
        """Build the actor, critics, target critics and their learners."""
        return self.actor_and_critics(ContinuousNetworks, generator, likelihood_loss)

    def update_from(self, sample: Sample, weight_B: Tensor | None, report: bool) -> tuple[dict[str, Tensor], Tensor]:
        """Update the critics and the actor with a batch."""
        batch, next_features = self.recorded(sample, weight_B)
        metrics, error_B = self.step_critics(sample, batch, self._next_values(next_features), report)
        advantage_B = self._advantage(batch)
        imitation_B = advantage_weight(advantage_B / self.temperature, self.weights)
        return self.imitate(batch, advantage_B, imitation_B, report) | metrics, error_B

    @torch.no_grad()
    def _next_values(self, next_features: Features) -> Tensor:
        return self.networks.target_critics(next_features, self._sampled_action(next_features)).amin(0)

    @torch.no_grad()
    def _advantage(self, batch: Batch) -> Tensor:
        critics = self.networks.critics
        sampled_BA = self._sampled_action(batch.features)
        return critics(batch.features, batch.action).amin(0) - critics(batch.features, sampled_BA).amin(0)

    def _sampled_action(self, features: Features) -> Tensor:
        return self.networks.actor.distribution(features).sample(self.generator).tanh()


def advantage_weight(advantage_B: Tensor, weights: str) -> Tensor:
    """Return exp(A), or the softmax of A over the batch times B; (B,)."""
    return advantage_B.exp() if weights == "exp" else advantage_B.softmax(0) * len(advantage_B)
