"""Advantage-weighted actor-critic.

Shapes: K critics, N environments, B rows of a batch, A numbers of an action.
"""

from __future__ import annotations

from typing import Any, Unpack

import torch
from gymnasium import spaces
from torch import Tensor

from rein.agents.base.critic_loss import CriticBatch, critic_gradient, critic_loss, has_closed_form
from rein.agents.base.imitation import ImitationBatch, likelihood_loss
from rein.agents.base.options import Scheduled, above_zero, at_least_one
from rein.agents.base.policies import ActorPolicy
from rein.agents.base.replay_agent import ReplayAgent, ReplayOptions
from rein.networks.continuous import ContinuousNetworks
from rein.ops.backend import without_gradient
from rein.ops.random import generator
from rein.ops.values import td_target
from rein.replay.replay import Sample
from rein.schedules import Schedule
from rein.types import Tree

WEIGHTS = ("softmax", "exp")


class AWAC(ReplayAgent[ContinuousNetworks]):
    """AWAC (Nair et al. 2020): imitates recorded actions, and more so those that were better than the policy's own.

        y    = r + gamma * min_k Q'_k(s', a'),  a' ~ pi(s'),  and r alone where s' is the end
        L_Q  = sum_k mean (Q_k(s, a) - y)^2 / 2
        A    = min_k Q_k(s, a) - min_k Q_k(s, b),  b ~ pi(s)
        L_pi = mean -w log pi(a | s),  w = exp(A / temperature), or B times the batch's softmax of A / temperature

    Where rows are `prioritized`, their weights are in both losses: pi too is of what is in the data, not of how often
    it is drawn. It learns from a filled replay by `rein.training.offline.offline_loop`, and goes on in environments by
    `training_loop`.

    Args:
        observation_space: of one environment; flattened to a vector.
        action_space: a Box with finite bounds.
        critics: K, drawn independently of each other.
        temperature: by how much an action must be better to count e times as much, in units of the return.
        weights: "softmax", whose mean in a batch is 1, or "exp".
        max_weight: the largest w.
        actor_learning_rate: of the actor; a number or a schedule, None for learning_rate.
        **options: those of `rein.agents.base.replay_agent.ReplayOptions`; here learning_starts is 0 by default.

    Raises ValueError for spaces that do not fit and numbers out of their range, TypeError for unknown options.
    """

    reports = ("critic_loss", "action_value", "actor_loss", "advantage", "largest_weight")
    actor_learning_rate: Scheduled = Scheduled(optional=True)

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        *,
        critics: int = 2,
        temperature: float = 1.0,
        weights: str = "softmax",
        max_weight: float = 100.0,
        actor_learning_rate: float | Schedule | None = None,
        **options: Unpack[ReplayOptions],
    ) -> None:
        critics = at_least_one(self, "critics", critics)
        temperature = above_zero(self, "temperature", temperature)
        max_weight = above_zero(self, "max_weight", max_weight)
        if weights not in WEIGHTS:
            raise ValueError(f"AWAC(weights={weights!r}): use one of {', '.join(WEIGHTS)}")
        own = {"critics": critics, "temperature": temperature, "weights": weights, "max_weight": max_weight}
        own["actor_learning_rate"] = actor_learning_rate
        super().__init__(observation_space, action_space, own, {"learning_starts": 0, **options})

    def _make_networks(self, drawn: torch.Generator) -> ContinuousNetworks:
        options = self._options
        names = ("critics", "hidden", "activation", "stem", "normalize_observation", "scale_images")
        shape = {name: options[name] for name in names}
        networks = ContinuousNetworks(self.observation_space, self.action_space, drawn, stochastic=True, **shape)
        written = has_closed_form(networks.critics)
        self._critics = self.learner("critics", networks.critics, critic_loss, critic_gradient if written else None)
        self._actor = self.learner("actor", networks.actor, likelihood_loss)
        self.follow(networks.target_critics, networks.critics)
        return networks

    def _explore(self, observation: Tree) -> Tensor:
        return self.networks.explore(observation, self._generator)

    def _update(self, sample: Sample, weight_B: Tensor | None, report: bool) -> tuple[dict[str, Tensor], Tensor]:
        networks = self.networks
        features, next_features = networks.encoder(sample.observation), networks.encoder(sample.next_observation)
        action_BA = networks.scale.from_action(sample.action)
        batch = CriticBatch(features, action_BA, self._target(sample, next_features), weight_B)
        metrics = self._critics.step(batch, None, report=report)
        advantage_B = self._advantage(features, action_BA)
        imitated_B = advantage_weight(advantage_B / self._options["temperature"], self._options["weights"])
        imitated_B = imitated_B.clamp_(max=self._options["max_weight"])
        recorded = ImitationBatch(features, action_BA, imitated_B if weight_B is None else imitated_B * weight_B)
        metrics |= self._actor.step(recorded, None, report=report)
        if report:
            metrics |= {"advantage": advantage_B.mean(), "largest_weight": imitated_B.amax()}
        metrics.pop("error")
        return metrics, metrics.pop("td_error")

    @without_gradient
    def _target(self, sample: Sample, next_features: Tensor) -> Tensor:
        networks = self.networks
        action_BA = networks.actor.distribution(next_features).sample(self._generator).tanh()
        value_B = networks.target_critics(next_features, action_BA).amin(0)
        return td_target(sample.reward, sample.terminated, value_B, sample.discount)

    @without_gradient
    def _advantage(self, features: Tensor, action_BA: Tensor) -> Tensor:
        networks = self.networks
        own_BA = networks.actor.distribution(features).sample(self._generator).tanh()
        return networks.critics(features, action_BA).amin(0) - networks.critics(features, own_BA).amin(0)

    def policy(self, deterministic: bool = True) -> ActorPolicy:
        """Acts by the actor as it is at any time: the middle of its distribution, or samples under an own generator."""
        own = None if deterministic else generator(self._root, "policy", device=self.device)
        return ActorPolicy(self.networks, own, self.device)


def advantage_weight(advantage_B: Tensor, weights: str) -> Tensor:
    """exp A, or B times the softmax of A over the batch; (B,)."""
    return advantage_B.exp() if weights == "exp" else advantage_B.softmax(0) * len(advantage_B)
