"""Soft actor-critic.

Shapes: K critics, N environments, B rows of a batch, A numbers of an action.
"""

from __future__ import annotations

from typing import Any, Unpack

import torch
from gymnasium import spaces
from torch import Tensor

from rein.agents.base.critic_loss import (
    ActorBatch,
    CriticBatch,
    Temperature,
    TemperatureBatch,
    check_learned,
    critic_gradient,
    critic_loss,
    has_closed_form,
    soft_actor_gradient,
    soft_actor_loss,
    temperature_gradient,
    temperature_loss,
)
from rein.agents.base.options import Scheduled, above_zero, at_least_one, finite
from rein.agents.base.policies import ActorPolicy
from rein.agents.base.replay_agent import ReplayAgent, ReplayOptions
from rein.networks.continuous import ContinuousNetworks
from rein.ops.backend import without_gradient
from rein.ops.random import generator
from rein.ops.values import td_target
from rein.replay.replay import Sample
from rein.schedules import Schedule
from rein.types import Tree


class SAC(ReplayAgent["_Networks"]):
    """Soft actor-critic (Haarnoja et al. 2018): as much reward as there is, by a policy as random as that allows.

        y    = r + gamma * (min_k Q'_k(s', a') - alpha * log pi(a' | s')),  a' ~ pi(s'),  r alone at an end
        L_Q  = sum_k mean (Q_k(s, a) - y)^2 / 2
        L_pi = mean (alpha * log pi(a | s) - min_k Q_k(s, a)),  a ~ pi(s)
        L_a  = mean -log alpha * (log pi(a | s) + target_entropy)

    Q' are targets, which follow the K critics by `tau`. Critics see actions between -1 and 1, whatever the bounds of
    the space are, and densities are those of such actions: so `target_entropy` means the same in any unit.

    Args:
        observation_space: of one environment; flattened to a vector.
        action_space: a Box with finite bounds.
        critics: K, drawn independently of each other.
        temperature: alpha, if it is fixed; None to learn it.
        initial_temperature: what alpha begins with where it is learned.
        target_entropy: in nats; minus the number of an action's dimensions by default.
        actor_frequency: updates between two of the actor's.
        actor_learning_rate: of the actor; a number or a schedule, None for learning_rate.
        temperature_learning_rate: the same of the temperature, where it is learned.
        **options: those of `rein.agents.base.replay_agent.ReplayOptions`.

    Raises ValueError for spaces that do not fit and numbers out of their range, TypeError for unknown options.
    """

    reports = ("critic_loss", "action_value", "actor_loss", "entropy", "temperature")
    actor_learning_rate: Scheduled = Scheduled(optional=True)
    temperature_learning_rate: Scheduled = Scheduled(optional=True)

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        *,
        critics: int = 2,
        temperature: float | None = None,
        initial_temperature: float = 1.0,
        target_entropy: float | None = None,
        actor_frequency: int = 1,
        actor_learning_rate: float | Schedule | None = None,
        temperature_learning_rate: float | Schedule | None = None,
        **options: Unpack[ReplayOptions],
    ) -> None:
        critics = at_least_one(self, "critics", critics)
        actor_frequency = at_least_one(self, "actor_frequency", actor_frequency)
        temperature = above_zero(self, "temperature", temperature)
        initial_temperature = above_zero(self, "initial_temperature", initial_temperature)
        check_learned(self, temperature, temperature_learning_rate)
        own = {
            "critics": critics,
            "temperature": temperature,
            "initial_temperature": initial_temperature,
            "target_entropy": finite(self, "target_entropy", target_entropy),
            "actor_frequency": actor_frequency,
            "actor_learning_rate": actor_learning_rate,
            "temperature_learning_rate": temperature_learning_rate,
        }
        super().__init__(observation_space, action_space, own, options)

    def _make_networks(self, drawn: torch.Generator) -> _Networks:
        options = self._options
        networks = _Networks(
            self.observation_space,
            self.action_space,
            drawn,
            critics=options["critics"],
            stochastic=True,
            hidden=options["hidden"],
            activation=options["activation"],
            normalize_observation=options["normalize_observation"],
            scale_images=options["scale_images"],
            stem=options["stem"],
        )
        fixed = options["temperature"]
        networks.temperature = Temperature(options["initial_temperature"] if fixed is None else fixed, self.device)
        written = has_closed_form(networks.critics)
        self._critics = self.learner("critics", networks.critics, critic_loss, critic_gradient if written else None)
        climb = soft_actor_gradient if written else None
        self._actor = self.learner("actor", networks.actor, soft_actor_loss, climb)
        self._temperature = None
        if fixed is None:
            self._temperature = self.learner(
                "temperature", networks.temperature, temperature_loss, temperature_gradient
            )
        self.follow(networks.target_critics, networks.critics)
        wanted = options["target_entropy"]
        self._target_entropy = -float(networks.scale.actions) if wanted is None else wanted
        return networks

    def _explore(self, observation: Tree) -> Tensor:
        return self.networks.explore(observation, self._generator)

    def _update(self, sample: Sample, weight_B: Tensor | None, report: bool) -> tuple[dict[str, Tensor], Tensor]:
        networks = self.networks
        features, next_features = networks.encoder(sample.observation), networks.encoder(sample.next_observation)
        shape = 2, len(sample.reward), networks.scale.actions
        noise_BA = torch.randn(shape, generator=self._generator, dtype=torch.float32, device=self.device)
        alpha = networks.temperature.log.detach().exp()
        target_B = self._target(sample, next_features, noise_BA[0], alpha)
        batch = CriticBatch(features, networks.scale.from_action(sample.action), target_B, weight_B)
        metrics = self._critics.step(batch, None, report=report)
        error_B = metrics.pop("td_error")
        if (self.updates + 1) % self._options["actor_frequency"] == 0:  # so that a whole round reports it
            metrics |= self._step_actor(ActorBatch(features, noise_BA[1]), alpha, report)
        return (metrics | {"temperature": alpha}) if report else metrics, error_B

    def _step_actor(self, batch: ActorBatch, alpha: Tensor, report: bool) -> dict[str, Tensor]:
        metrics = self._actor.step(batch, (self.networks.critics, alpha), report=report)
        log_prob_B = metrics.pop("log_prob")
        if self._temperature is not None:
            self._temperature.step(TemperatureBatch(log_prob_B), self._target_entropy, report=False)
        return metrics

    @without_gradient
    def _target(self, sample: Sample, next_features: Tensor, noise_BA: Tensor, alpha: Tensor) -> Tensor:
        distribution = self.networks.actor.distribution(next_features)
        action = distribution.sample_from(noise_BA)
        value_KB = self.networks.target_critics(next_features, action.tanh())
        value_B = value_KB.amin(0) - alpha * distribution.log_prob(action)
        return td_target(sample.reward, sample.terminated, value_B, sample.discount)

    def policy(self, deterministic: bool = True) -> ActorPolicy:
        """Acts by the actor as it is at any time: the middle of its distribution, or samples of its own."""
        own = None if deterministic else generator(self._root, "policy", device=self.device)
        return ActorPolicy(self.networks, own, self.device)


class _Networks(ContinuousNetworks):
    temperature: Temperature
