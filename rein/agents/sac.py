"""Soft actor-critic.

Shapes: K critics, N environments, B rows of a batch, A action dimensions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rein.agents.base.learner import Batch
from rein.agents.base.losses import Temperature, check_learned, critic_loss, temperature_loss
from rein.agents.base.options import option
from rein.agents.base.replay_agent import ContinuousActions, ReplayAgent
from rein.networks.encoder import Features, NetworkFactory
from rein.networks.off_policy import Actor, ContinuousNetworks
from rein.ops.values import td_target
from rein.replay.replay import Sample
from rein.schedules import Schedule
from rein.types import Tree


class SAC(ContinuousActions, ReplayAgent):
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

    critics: int = option(default=2)
    temperature: float | None = option(default=None)
    initial_temperature: float = option(default=1.0)
    target_entropy: float | None = option(default=None)
    actor_frequency: int = option(default=1)
    actor: NetworkFactory | None = option(default=None)
    critic: NetworkFactory | None = option(default=None)
    actor_learning_rate: float | Schedule | None = option(default=None)
    temperature_learning_rate: float | Schedule | None = option(default=None)

    reports = ("critic_loss", "action_value", "actor_loss", "entropy", "temperature", "grad_norm")

    def build_networks(self, generator: torch.Generator) -> _Networks:
        """Build the actor, critics, target critics, temperature and their learners."""
        check_learned(self, self.temperature, self.temperature_learning_rate)
        networks = _Networks(
            self.observation_space,
            self.action_space,
            generator,
            **self.options(
                "critics", "hidden", "activation", "normalize_observation", "scale_images", "encoder", "actor", "critic"
            ),
        )
        fixed = self.temperature
        networks.temperature = Temperature(
            self.initial_temperature if fixed is None else fixed, torch.device(self.device)
        )
        self._critics = self.add_learner("critics", networks.critics, critic_loss)
        self._actor = self.add_learner("actor", networks.actor, soft_actor_loss)
        self._temperature = None
        if fixed is None:
            self._temperature = self.add_learner("temperature", networks.temperature, temperature_loss)
        self.follow(networks.target_critics, networks.critics)
        target_entropy = self.target_entropy
        self._target_entropy = -float(networks.scale.actions) if target_entropy is None else target_entropy
        return networks

    def act(self, observation: Tree, explore: bool | float) -> Tensor:
        """Return the tanh of the mean, scaled to the bounds, or a sample if `explore` is set; (N, ...)."""
        return self.networks.act(observation, self.generator if explore else None)

    def update_from(self, sample: Sample, weight_B: Tensor | None, report: bool) -> tuple[dict[str, Tensor], Tensor]:
        """Update the critics with a batch. Updates the actor and the temperature every `actor_frequency` updates."""
        networks = self.networks
        features, next_features = networks.preprocess(sample.observation), networks.preprocess(sample.next_observation)
        shape = 2, len(sample.reward), networks.scale.actions
        noise_BA = torch.randn(shape, generator=self.generator, dtype=torch.float32, device=self.device)
        alpha = networks.temperature.log.detach().exp()
        target_B = self._target(sample, next_features, noise_BA[0], alpha)
        batch = Batch(features, networks.scale.from_action(sample.action), target=target_B, weight=weight_B)
        metrics = self._critics.step(batch, None, report=report)
        error_B = metrics.pop("td_error")
        if (self.updates + 1) % self.actor_frequency == 0:  # the last update of a round reports all metrics
            metrics = self._step_actor(Batch(features, noise=noise_BA[1]), alpha, report) | metrics
        return (metrics | {"temperature": alpha}) if report else metrics, error_B

    def _step_actor(self, batch: Batch, alpha: Tensor, report: bool) -> dict[str, Tensor]:
        metrics = self._actor.step(batch, (self.networks.critics, alpha), report=report)
        log_prob_B = metrics.pop("log_prob")
        if self._temperature is not None:
            self._temperature.step(Batch(log_prob=log_prob_B), self._target_entropy, report=False)
        return metrics

    @torch.no_grad()
    def _target(self, sample: Sample, next_features: Features, noise_BA: Tensor, alpha: Tensor) -> Tensor:
        distribution = self.networks.actor.distribution(next_features)
        action = distribution.sample_from(noise_BA)
        value_KB = self.networks.target_critics(next_features, action.tanh())
        value_B = value_KB.amin(0) - alpha * distribution.log_prob(action)
        return td_target(sample.reward, sample.terminated, value_B, sample.discount)


class _Networks(ContinuousNetworks):
    temperature: Temperature


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
