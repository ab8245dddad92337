"""Implicit Q-learning.

Shapes: K critics, N environments, B rows of a batch, A numbers of an action.
"""

from __future__ import annotations

from typing import Any, Unpack

import torch
from gymnasium import spaces
from torch import Tensor

from rein.agents.base.critic_loss import CriticBatch, critic_gradient, critic_loss, has_closed_form
from rein.agents.base.imitation import ImitationBatch, ValueBatch, expectile_loss, likelihood_loss
from rein.agents.base.options import Scheduled, above_zero, at_least_one
from rein.agents.base.policies import ActorPolicy
from rein.agents.base.replay_agent import ReplayAgent, ReplayOptions
from rein.networks.continuous import ContinuousNetworks, StateValue
from rein.networks.encoder import stem_for
from rein.ops.backend import without_gradient
from rein.ops.random import generator
from rein.ops.values import td_target
from rein.replay.replay import Sample
from rein.schedules import Schedule
from rein.types import Tree


class IQL(ReplayAgent["_Networks"]):
    """IQL (Kostrikov et al. 2022): the best of what was done, without ever asking what something else is worth.

        L_V  = mean |expectile - [e < 0]| e^2,  e = min_k Q'_k(s, a) - V(s)
        y    = r + gamma * V(s'),  and r alone where s' is the end
        L_Q  = sum_k mean (Q_k(s, a) - y)^2 / 2
        L_pi = mean -min(exp(inverse_temperature * e), max_weight) log pi(a | s)

    Q' are targets, which follow the K critics by `tau`. Where rows are `prioritized`, their weights are in all three
    losses: V and pi too are of what is in the data, not of how often it is drawn. It learns from a filled replay by
    `rein.training.offline.offline_loop`, and goes on in environments by `training_loop`.

    Args:
        observation_space: of one environment; flattened to a vector.
        action_space: a Box with finite bounds.
        critics: K, drawn independently of each other.
        expectile: which one of the values of the recorded actions is a state's value: 0.5 for the mean, toward 1 for
            the best action.
        inverse_temperature: how much more an action counts that is better by 1, in units of the return: e to the
            power of it. 0 is behaviour cloning.
        max_weight: the largest that an action counts.
        actor_learning_rate: of the actor; a number or a schedule, None for learning_rate.
        **options: those of `rein.agents.base.replay_agent.ReplayOptions`; here learning_starts is 0 by default.

    Raises ValueError for spaces that do not fit and numbers out of their range, TypeError for unknown options.
    """

    reports = ("critic_loss", "action_value", "value_loss", "value", "actor_loss", "advantage", "largest_weight")
    actor_learning_rate: Scheduled = Scheduled(optional=True)

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        *,
        critics: int = 2,
        expectile: float = 0.7,
        inverse_temperature: float = 3.0,
        max_weight: float = 100.0,
        actor_learning_rate: float | Schedule | None = None,
        **options: Unpack[ReplayOptions],
    ) -> None:
        critics = at_least_one(self, "critics", critics)
        max_weight = above_zero(self, "max_weight", max_weight)
        if not 0.0 < expectile < 1.0:
            raise ValueError(f"IQL(expectile={expectile}): give a number between 0 and 1, neither of them")
        if not inverse_temperature >= 0.0:
            raise ValueError(f"IQL(inverse_temperature={inverse_temperature}): give 0 or more")
        own = {
            "critics": critics,
            "expectile": expectile,
            "inverse_temperature": inverse_temperature,
            "max_weight": max_weight,
            "actor_learning_rate": actor_learning_rate,
        }
        super().__init__(observation_space, action_space, own, {"learning_starts": 0, **options})

    def _make_networks(self, drawn: torch.Generator) -> _Networks:
        options = self._options
        names = ("critics", "hidden", "activation", "stem", "normalize_observation", "scale_images")
        shape = {name: options[name] for name in names}
        networks = _Networks(self.observation_space, self.action_space, drawn, stochastic=True, **shape)
        sizes = networks.encoder.features, tuple(options["hidden"]), options["activation"]
        stem = stem_for(self.observation_space, drawn, options["stem"])
        networks.state_value = StateValue(*sizes, drawn, stem=stem)
        written = has_closed_form(networks.critics)
        self._critics = self.learner("critics", networks.critics, critic_loss, critic_gradient if written else None)
        self._value = self.learner("value", networks.state_value, expectile_loss)
        self._actor = self.learner("actor", networks.actor, likelihood_loss)
        self.follow(networks.target_critics, networks.critics)
        return networks

    def _explore(self, observation: Tree) -> Tensor:
        return self.networks.explore(observation, self._generator)

    def _update(self, sample: Sample, weight_B: Tensor | None, report: bool) -> tuple[dict[str, Tensor], Tensor]:
        networks = self.networks
        features, next_features = networks.encoder(sample.observation), networks.encoder(sample.next_observation)
        action_BA = networks.scale.from_action(sample.action)
        done_B = self._done(features, action_BA)
        metrics = self._value.step(ValueBatch(features, done_B, weight_B), self._options["expectile"], report=report)
        value_B, next_value_B = self._values(features, next_features)
        advantage_B = done_B - value_B
        imitated_B = (advantage_B * self._options["inverse_temperature"]).exp_()
        imitated_B = imitated_B.clamp_(max=self._options["max_weight"])
        target_B = td_target(sample.reward, sample.terminated, next_value_B, sample.discount)
        recorded = ImitationBatch(features, action_BA, imitated_B if weight_B is None else imitated_B * weight_B)
        metrics |= self._actor.step(recorded, None, report=report)
        metrics |= self._critics.step(CriticBatch(features, action_BA, target_B, weight_B), None, report=report)
        if report:
            metrics |= {"advantage": advantage_B.mean(), "largest_weight": imitated_B.amax()}
        metrics.pop("error")
        return metrics, metrics.pop("td_error")

    @without_gradient
    def _done(self, features: Tensor, action_BA: Tensor) -> Tensor:
        return self.networks.target_critics(features, action_BA).amin(0)

    @without_gradient
    def _values(self, features: Tensor, next_features: Tensor) -> tuple[Tensor, ...]:
        return self.networks.state_value(torch.cat((features, next_features))).chunk(2)

    def policy(self, deterministic: bool = True) -> ActorPolicy:
        """Acts by the actor as it is at any time: the middle of its distribution, or samples under an own generator."""
        own = None if deterministic else generator(self._root, "policy", device=self.device)
        return ActorPolicy(self.networks, own, self.device)


class _Networks(ContinuousNetworks):
    state_value: StateValue
