"""Base classes of soft actor-critics, whose policies maximize expected return plus entropy.

Shapes: K critics, N environments, B rows of a batch, A action dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from rein.agents.base.actor_and_critics import ActorAndCritics, ContinuousActions
from rein.agents.base.learner import Batch, Loss
from rein.networks.encoder import Features
from rein.networks.off_policy import Actor, ContinuousNetworks
from rein.options import option
from rein.replay.replay import Sample
from rein.schedules import Schedule


class Temperature(nn.Module):
    """Logarithm of the entropy weight alpha, as a parameter."""

    def __init__(self, initial: float, device: torch.device) -> None:
        super().__init__()
        self.log = nn.Parameter(torch.full((), math.log(initial), dtype=torch.float32, device=device))


def temperature_loss(
    temperature: Temperature, batch: Batch, target_entropy: float, *, report: bool = True
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute mean -log alpha * (log pi + target_entropy). Alpha increases while the entropy is below its target.

    Source: Haarnoja et al. 2018 ("Soft actor-critic algorithms and applications"), equation 18, with log alpha.
    """
    return -temperature.log * (batch.log_prob.mean() + target_entropy), {}


class SoftActorCritic(ActorAndCritics):
    """Base class of soft actor-critics: adds the entropy of the policy to rewards, with a learned or fixed weight."""

    critics: int = option(default=2)
    temperature: float | None = option(default=None)
    initial_temperature: float = option(default=1.0)
    target_entropy: float | None = option(default=None)
    temperature_learning_rate: float | Schedule | None = option(default=None)

    reports = ("critic_loss", "action_value", "actor_loss", "entropy", "temperature", "grad_norm")

    def add_temperature(self, networks: nn.Module, target_entropy: float) -> None:
        """Add `networks.temperature` and its learner. `target_entropy` applies if the option is None."""
        initial = self.initial_temperature if self.temperature is None else self.temperature
        networks.temperature = Temperature(initial, torch.device(self.device))
        self._temperature = None
        self._target_entropy = target_entropy if self.target_entropy is None else self.target_entropy
        if self.temperature is None:
            self._temperature = self.add_learner("temperature", networks.temperature, temperature_loss)
        elif self.temperature_learning_rate is not None:
            raise ValueError(
                f"{type(self).__name__}(temperature={self.temperature:g}, temperature_learning_rate="
                f"{self.temperature_learning_rate!r}): a fixed temperature is not learned; give only one of the two "
                "options"
            )

    def step_actor(
        self, batch: Batch, alpha: Tensor, target_entropy: float | Tensor, report: bool
    ) -> dict[str, Tensor]:
        """Update the actor and, if it is learned, the temperature. Returns the metrics of the actor."""
        metrics = self._actor.step(batch, (self.networks.critics, alpha), report=report)
        log_prob_B = metrics.pop("log_prob")
        if self._temperature is not None:
            self._temperature.step(Batch(log_prob=log_prob_B), target_entropy, report=False)
        return metrics


def soft_actor_loss(
    actor: Actor, batch: Batch, coefficients: Any, *, report: bool = True
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute mean (alpha * log pi(a | s) - min_k Q_k(s, a)) for samples a.

    The metrics contain the log probabilities `log_prob` (B,).

    Source: Haarnoja et al. 2018 ("Soft actor-critic algorithms and applications"), equation 7.
    """
    return _actor_loss(actor, batch, coefficients, lambda value_KB: value_KB.amin(0), report)


def mean_actor_loss(
    actor: Actor, batch: Batch, coefficients: Any, *, report: bool = True
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute `soft_actor_loss` with the mean of all critics, or of all their quantiles, instead of the smallest value.

    Sources: Kuznetsov et al. 2020 (TQC), equation 13; Chen et al. 2021 (REDQ), algorithm 1.
    """
    return _actor_loss(actor, batch, coefficients, lambda value_KB: value_KB.transpose(0, 1).flatten(1).mean(1), report)


def _actor_loss(
    actor: Actor, batch: Batch, coefficients: Any, combine: Callable[[Tensor], Tensor], report: bool
) -> tuple[Tensor, dict[str, Tensor]]:
    critics, temperature = coefficients
    distribution = actor.distribution(batch.features)
    sample = distribution.sample_from(batch.noise)
    log_prob_B = distribution.log_prob(sample)
    value_B = combine(critics.frozen(batch.features, sample.tanh()))
    loss = (temperature * log_prob_B - value_B).mean()
    metrics = {"log_prob": log_prob_B.detach()}
    if report:
        metrics |= {"actor_loss": loss.detach(), "entropy": -log_prob_B.detach().mean()}
    return loss, metrics


class ContinuousSoftActorCritic(ContinuousActions, SoftActorCritic):
    """Base class of SAC and its variants: a squashed Gaussian policy, and updates of all networks from one batch."""

    actor_frequency: int = option(default=1)

    def soft_networks(
        self, generator: torch.Generator, actor_loss: Loss = soft_actor_loss, **options: Any
    ) -> ContinuousNetworks:
        """Build the actor, critics, temperature and their learners. `options` are those of `actor_and_critics`."""
        networks = self.actor_and_critics(ContinuousNetworks, generator, actor_loss, **options)
        self.add_temperature(networks, -float(networks.scale.actions))
        return networks

    def update_from(self, sample: Sample, weight_B: Tensor | None, report: bool) -> tuple[dict[str, Tensor], Tensor]:
        """Update the critics with a batch. Updates the actor and the temperature every `actor_frequency` updates."""
        batch, next_features = self.recorded(sample, weight_B)
        shape = 2, *batch.action.shape
        noise_2BA = torch.randn(shape, generator=self.generator, dtype=torch.float32, device=self.device)
        alpha = self.networks.temperature.log.detach().exp()
        metrics, error_B = self.update_critics(sample, batch, next_features, noise_2BA[0], alpha, report)
        if (self.updates + 1) % self.actor_frequency == 0:  # the last update of a round reports all metrics
            of_actor = Batch(batch.features, noise=noise_2BA[1])
            metrics = self.step_actor(of_actor, alpha, self._target_entropy, report) | metrics
        return (metrics | {"temperature": alpha}) if report else metrics, error_B

    def update_critics(
        self, sample: Sample, batch: Batch, next_features: Features, noise_BA: Tensor, alpha: Tensor, report: bool
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Update the critics. Returns metrics and the errors (B,)."""
        return self.step_critics(sample, batch, self.next_values(next_features, noise_BA, alpha), report)

    @torch.no_grad()
    def next_values(self, next_features: Features, noise_BA: Tensor, alpha: Tensor) -> Tensor:
        """Return the values (B,) of next observations, which include the entropy of the policy."""
        action_BA, log_prob_B = self.next_actions(next_features, noise_BA)
        return self.lowest(self.networks.target_critics(next_features, action_BA)) - alpha * log_prob_B

    def lowest(self, value_KB: Tensor) -> Tensor:
        """Return the smallest value of each row, (B,)."""
        return value_KB.amin(0)

    def next_actions(self, next_features: Features, noise_BA: Tensor) -> tuple[Tensor, Tensor]:
        """Return actions (B, A) of the policy, scaled to [-1, 1], and their log probabilities (B,)."""
        distribution = self.networks.actor.distribution(next_features)
        sample_BA = distribution.sample_from(noise_BA)
        return sample_BA.tanh(), distribution.log_prob(sample_BA)
