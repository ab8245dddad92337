"""Soft actor-critic for discrete actions.

Shapes: K critics, N environments, B rows of a batch, A actions.
"""

from __future__ import annotations

import math
from typing import Any, Unpack

import torch
from gymnasium import spaces
from torch import Tensor

from rein.agents.base.critic_loss import (
    CriticBatch,
    Temperature,
    TemperatureBatch,
    check_learned,
    squared_errors,
    temperature_gradient,
    temperature_loss,
)
from rein.agents.base.options import Scheduled, above_zero, at_least_one, finite
from rein.agents.base.policies import NetworkPolicy
from rein.agents.base.replay_agent import ReplayAgent, ReplayOptions
from rein.networks.discrete import ActionValues, DiscreteActor, DiscreteNetworks
from rein.ops.backend import without_gradient
from rein.ops.random import generator
from rein.ops.values import td_target
from rein.replay.replay import Sample
from rein.schedules import Schedule
from rein.types import Tree


class DiscreteSAC(ReplayAgent["_Networks"]):
    """Soft actor-critic among A actions (Christodoulou 2019): expectations over actions are sums, nothing is sampled.

        V(s) = sum_a pi(a | s) (min_k Q'_k(s, a) - alpha log pi(a | s))
        y    = r + gamma V(s'),  and r alone where s' is the end
        L_Q  = sum_k mean (Q_k(s, a) - y)^2 / 2
        L_pi = mean sum_a pi(a | s) (alpha log pi(a | s) - min_k Q_k(s, a))
        L_a  = mean sum_a -pi(a | s) log alpha (log pi(a | s) + target_entropy)

    Args:
        observation_space: of one environment; flattened to a vector.
        action_space: Discrete.
        critics: K, drawn independently of each other.
        temperature: alpha, if it is fixed; None to learn it.
        initial_temperature: what alpha begins with where it is learned.
        target_entropy: in nats; half of the most there is, log A, by default.
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
        actor_learning_rate: float | Schedule | None = None,
        temperature_learning_rate: float | Schedule | None = None,
        **options: Unpack[ReplayOptions],
    ) -> None:
        critics = at_least_one(self, "critics", critics)
        temperature = above_zero(self, "temperature", temperature)
        initial_temperature = above_zero(self, "initial_temperature", initial_temperature)
        check_learned(self, temperature, temperature_learning_rate)
        own = {
            "critics": critics,
            "temperature": temperature,
            "initial_temperature": initial_temperature,
            "target_entropy": finite(self, "target_entropy", target_entropy),
            "actor_learning_rate": actor_learning_rate,
            "temperature_learning_rate": temperature_learning_rate,
        }
        super().__init__(observation_space, action_space, own, options)

    def _make_networks(self, drawn: torch.Generator) -> _Networks:
        options = self._options
        names = ("critics", "hidden", "activation", "stem", "normalize_observation", "scale_images")
        shape = {name: options[name] for name in names}
        networks = _Networks(self.observation_space, self.action_space, drawn, **shape)
        fixed, wanted = options["temperature"], options["target_entropy"]
        networks.temperature = Temperature(options["initial_temperature"] if fixed is None else fixed, self.device)
        self._critics = self.learner("critics", networks.critics, critic_loss)
        self._actor = self.learner("actor", networks.actor, actor_loss)
        self._temperature = None
        if fixed is None:
            settings = networks.temperature, temperature_loss, temperature_gradient
            self._temperature = self.learner("temperature", *settings)
        self.follow(networks.target_critics, networks.critics)
        most = math.log(int(self.action_space.n))  # type: ignore[attr-defined]  # the networks want Discrete
        self._target_entropy = 0.5 * most if wanted is None else wanted
        return networks

    def _explore(self, observation: Tree) -> Tensor:
        networks = self.networks
        distribution = networks.actor(networks.encoder(observation))
        return networks.policy_head.to_action(distribution, distribution.sample(self._generator))

    def _update(self, sample: Sample, weight_B: Tensor | None, report: bool) -> tuple[dict[str, Tensor], Tensor]:
        networks = self.networks
        features, next_features = networks.encoder(sample.observation), networks.encoder(sample.next_observation)
        alpha = networks.temperature.log.detach().exp()
        action_B = sample.action.long() - int(self.action_space.start)  # type: ignore[attr-defined]  # Discrete
        batch = CriticBatch(features, action_B, self._target(sample, next_features, alpha), weight_B)
        metrics = self._critics.step(batch, None, report=report)
        error_B = metrics.pop("td_error")
        metrics |= self._actor.step(batch, (networks.critics, alpha), report=report)
        log_prob_B = metrics.pop("log_prob")
        if self._temperature is not None:
            self._temperature.step(TemperatureBatch(log_prob_B), self._target_entropy, report=False)
        return (metrics | {"temperature": alpha}) if report else metrics, error_B

    @without_gradient
    def _target(self, sample: Sample, next_features: Tensor, alpha: Tensor) -> Tensor:
        log_prob_BA = self.networks.actor(next_features).log_probs
        value_BA = self.networks.target_critics(next_features).amin(0) - alpha * log_prob_BA
        return td_target(sample.reward, sample.terminated, (log_prob_BA.exp() * value_BA).sum(1), sample.discount)

    def policy(self, deterministic: bool = True) -> NetworkPolicy:
        """Acts by the actor as it is at any time: its likeliest action, or samples of its own."""
        own = None if deterministic else generator(self._root, "policy", device=self.device)
        return NetworkPolicy(self.networks, own, self.device)


class _Networks(DiscreteNetworks):
    temperature: Temperature


def critic_loss(
    critics: ActionValues, batch: CriticBatch, coefficients: None, *, report: bool = True
) -> tuple[Tensor, dict[str, Tensor]]:
    """Half the mean squared error of each critic, summed; the mean absolute errors of the rows as `td_error` (B,)."""
    value_KBA = critics(batch.features)
    action_KB1 = batch.action.view(1, -1, 1).expand(len(value_KBA), -1, 1)
    return squared_errors(value_KBA.gather(2, action_KB1).squeeze(2), batch, report)


def actor_loss(
    actor: DiscreteActor, batch: CriticBatch, coefficients: Any, *, report: bool = True
) -> tuple[Tensor, dict[str, Tensor]]:
    """mean sum_a pi (alpha log pi - min_k Q_k); and the mean log-probabilities of the rows, (B,)."""
    critics, alpha = coefficients
    with torch.no_grad():
        value_BA = critics(batch.features).amin(0)
    log_prob_BA = actor(batch.features).log_probs
    prob_BA = log_prob_BA.exp()
    loss = (prob_BA * (alpha * log_prob_BA - value_BA)).sum(1).mean()
    log_prob_B = (prob_BA * log_prob_BA).sum(1).detach()
    metrics = {"log_prob": log_prob_B}
    if report:
        metrics |= {"actor_loss": loss.detach(), "entropy": -log_prob_B.mean()}
    return loss, metrics
