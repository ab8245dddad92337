"""Soft actor-critic.

Shapes: K critics, N environments, B rows of a batch, A action dimensions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rein.agents.base.actor_and_critics import ContinuousActions, SoftActorCritic
from rein.agents.base.learner import Batch
from rein.networks.encoder import Features
from rein.networks.off_policy import Actor, ContinuousNetworks
from rein.options import option
from rein.replay.replay import Sample


class SAC(ContinuousActions, SoftActorCritic):
    """Soft actor-critic (Haarnoja et al. 2018): maximizes expected return plus entropy.

    Targets and losses::

        y    = r + gamma * (min_k Q'_k(s', a') - alpha * log pi(a' | s')),  a' ~ pi(s'),  or r at a terminal state
        L_Q  = sum_k mean (Q_k(s, a) - y)^2 / 2
        L_pi = mean (alpha * log pi(a | s) - min_k Q_k(s, a)),  a ~ pi(s)
        L_a  = mean -log alpha * (log pi(a | s) + target_entropy)

    The target networks Q' move toward the K critics by `tau`. Critics receive actions scaled to [-1, 1]. Log
    probabilities refer to scaled actions too, so `target_entropy` does not depend on the bounds of the action space.

    Observations are flattened. The entry `critic_observation` of a Dict observation is an input of the critics only.
    The action space must be a Box with finite bounds.
    """

    actor_frequency: int = option(default=1)

    def build_networks(self, generator: torch.Generator) -> ContinuousNetworks:
        """Build the actor, critics, target critics, temperature and their learners."""
        networks = self.actor_and_critics(ContinuousNetworks, generator, soft_actor_loss)
        self.add_temperature(networks, -float(networks.scale.actions))
        return networks

    def update_from(self, sample: Sample, weight_B: Tensor | None, report: bool) -> tuple[dict[str, Tensor], Tensor]:
        """Update the critics with a batch. Updates the actor and the temperature every `actor_frequency` updates."""
        batch, next_features = self.recorded(sample, weight_B)
        shape = 2, *batch.action.shape
        noise_2BA = torch.randn(shape, generator=self.generator, dtype=torch.float32, device=self.device)
        alpha = self.networks.temperature.log.detach().exp()
        next_value_B = self._next_values(next_features, noise_2BA[0], alpha)
        metrics, error_B = self.step_critics(sample, batch, next_value_B, report)
        if (self.updates + 1) % self.actor_frequency == 0:  # the last update of a round reports all metrics
            of_actor = Batch(batch.features, noise=noise_2BA[1])
            metrics = self.step_actor(of_actor, alpha, self._target_entropy, report) | metrics
        return (metrics | {"temperature": alpha}) if report else metrics, error_B

    @torch.no_grad()
    def _next_values(self, next_features: Features, noise_BA: Tensor, alpha: Tensor) -> Tensor:
        distribution = self.networks.actor.distribution(next_features)
        sample_BA = distribution.sample_from(noise_BA)
        value_KB = self.networks.target_critics(next_features, sample_BA.tanh())
        return value_KB.amin(0) - alpha * distribution.log_prob(sample_BA)


def soft_actor_loss(
    actor: Actor, batch: Batch, coefficients: Any, *, report: bool = True
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute mean (alpha * log pi(a | s) - min_k Q_k(s, a)) for samples a.

    The metrics contain the log probabilities `log_prob` (B,).

    Source: Haarnoja et al. 2018 ("Soft actor-critic algorithms and applications"), equation 7.
    """
    critics, temperature = coefficients
    distribution = actor.distribution(batch.features)
    sample = distribution.sample_from(batch.noise)
    log_prob_B = distribution.log_prob(sample)
    value_B = critics.frozen(batch.features, sample.tanh()).amin(0)
    loss = (temperature * log_prob_B - value_B).mean()
    metrics = {"log_prob": log_prob_B.detach()}
    if report:
        metrics |= {"actor_loss": loss.detach(), "entropy": -log_prob_B.detach().mean()}
    return loss, metrics
