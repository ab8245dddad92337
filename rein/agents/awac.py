"""Advantage-weighted actor-critic.

Shapes: K critics, N environments, B rows of a batch, A action dimensions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rein.agents.base.learner import Batch
from rein.agents.base.losses import critic_loss, likelihood_loss
from rein.agents.base.options import above_zero, one_of, option
from rein.agents.base.replay_agent import ContinuousActions, ReplayAgent
from rein.networks.encoder import Features, NetworkFactory
from rein.networks.off_policy import ContinuousNetworks
from rein.ops.values import td_target
from rein.replay.replay import Sample
from rein.schedules import Schedule
from rein.types import Tree


class AWAC(ContinuousActions, ReplayAgent):
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

    learning_starts: int = option(default=0)
    critics: int = option(default=2)
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
    max_weight: float = option(default=100.0)
    actor: NetworkFactory | None = option(default=None)
    critic: NetworkFactory | None = option(default=None)
    actor_learning_rate: float | Schedule | None = option(default=None)

    reports = ("critic_loss", "action_value", "actor_loss", "advantage", "largest_weight", "grad_norm")

    def build_networks(self, generator: torch.Generator) -> ContinuousNetworks:
        """Build the actor, critics, target critics and their learners."""
        shape = self.options(
            "critics", "hidden", "activation", "encoder", "actor", "critic", "normalize_observation", "scale_images"
        )
        networks = ContinuousNetworks(self.observation_space, self.action_space, generator, **shape)
        self._critics = self.add_learner("critics", networks.critics, critic_loss)
        self._actor = self.add_learner("actor", networks.actor, likelihood_loss)
        self.follow(networks.target_critics, networks.critics)
        return networks

    def act(self, observation: Tree, explore: bool | float) -> Tensor:
        """Return the tanh of the mean, scaled to the bounds, or a sample if `explore` is set; (N, ...)."""
        return self.networks.act(observation, self.generator if explore else None)

    def update_from(self, sample: Sample, weight_B: Tensor | None, report: bool) -> tuple[dict[str, Tensor], Tensor]:
        """Update the critics and the actor with a batch."""
        networks = self.networks
        features, next_features = networks.preprocess(sample.observation), networks.preprocess(sample.next_observation)
        action_BA = networks.scale.from_action(sample.action)
        batch = Batch(features, action_BA, target=self._target(sample, next_features), weight=weight_B)
        metrics = self._critics.step(batch, None, report=report)
        advantage_B = self._advantage(features, action_BA)
        imitation_B = advantage_weight(advantage_B / self.temperature, self.weights)
        imitation_B = imitation_B.clamp_(max=self.max_weight)
        recorded = Batch(features, action_BA, weight=imitation_B if weight_B is None else imitation_B * weight_B)
        metrics = self._actor.step(recorded, None, report=report) | metrics
        if report:
            metrics |= {"advantage": advantage_B.mean(), "largest_weight": imitation_B.amax()}
        metrics.pop("error")
        return metrics, metrics.pop("td_error")

    @torch.no_grad()
    def _target(self, sample: Sample, next_features: Features) -> Tensor:
        networks = self.networks
        action_BA = networks.actor.distribution(next_features).sample(self.generator).tanh()
        value_B = networks.target_critics(next_features, action_BA).amin(0)
        return td_target(sample.reward, sample.terminated, value_B, sample.discount)

    @torch.no_grad()
    def _advantage(self, features: Features, action_BA: Tensor) -> Tensor:
        networks = self.networks
        sampled_BA = networks.actor.distribution(features).sample(self.generator).tanh()
        return networks.critics(features, action_BA).amin(0) - networks.critics(features, sampled_BA).amin(0)


def advantage_weight(advantage_B: Tensor, weights: str) -> Tensor:
    """Return exp(A), or the softmax of A over the batch times B; (B,)."""
    return advantage_B.exp() if weights == "exp" else advantage_B.softmax(0) * len(advantage_B)
