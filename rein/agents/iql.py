"""Implicit Q-learning.

Shapes: K critics, N environments, B rows of a batch, A action dimensions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rein.agents.base.learner import Batch
from rein.agents.base.losses import critic_loss, likelihood_loss
from rein.agents.base.options import in_unit_interval, not_negative, option
from rein.agents.base.replay_agent import ContinuousActions, ReplayAgent
from rein.networks.custom_networks import CustomModules, CustomValue, encoder_of
from rein.networks.encoder import Features, NetworkFactory
from rein.networks.off_policy import ContinuousNetworks, Layers, StateValue
from rein.ops.losses import expectile
from rein.ops.trees import map_tree
from rein.ops.values import td_target
from rein.replay.replay import Sample
from rein.schedules import Schedule
from rein.types import Tree


def _between_zero_and_one(value: Any) -> float:
    if not 0.0 < in_unit_interval(value) < 1.0:
        raise ValueError("give a number above 0 and below 1")
    return float(value)


class IQL(ContinuousActions, ReplayAgent):
    """Implicit Q-learning (Kostrikov et al. 2022): offline learning that evaluates recorded actions only.

    Targets and losses::

        L_V  = mean |expectile - [e < 0]| e^2,  e = min_k Q'_k(s, a) - V(s)
        y    = r + gamma * V(s'),  or r at a terminal state
        L_Q  = sum_k mean (Q_k(s, a) - y)^2 / 2
        L_pi = mean -min(exp(inverse_temperature * e), max_weight) log pi(a | s)

    The target networks Q' move toward the K critics by `tau`. With `prioritized`, importance weights apply to all three
    losses. `rein.offline_loop` trains IQL on recorded data, and `rein.training_loop` continues in environments.

    Observations are flattened. The entry `critic_observation` of a Dict observation is an input of the critics and
    the state value only. The action space must be a Box with finite bounds.
    """

    learning_starts: int = option(default=0)
    critics: int = option(default=2)
    expectile: float = option(
        default=0.7,
        check=_between_zero_and_one,
        fixed=True,
        help="expectile of the values of recorded actions: 0.5 is the mean, values near 1 approach the maximum",
    )
    inverse_temperature: float = option(
        default=3.0, check=not_negative, fixed=True, help="factor of the advantage in the exponent; 0 clones behaviour"
    )
    max_weight: float = option(default=100.0)
    actor: NetworkFactory | None = option(default=None)
    critic: NetworkFactory | None = option(default=None)
    value: NetworkFactory | None = option(
        default=None,
        fixed=True,
        help="factory (observation_space, action_space, generator) of a custom state value; forward(observation) "
        "returns the values",
    )
    actor_learning_rate: float | Schedule | None = option(default=None)

    reports = (
        "critic_loss",
        "action_value",
        "value_loss",
        "value",
        "actor_loss",
        "advantage",
        "largest_weight",
        "grad_norm",
    )

    def build_networks(self, generator: torch.Generator) -> _Networks:
        """Build the actor, critics, target critics, state value and their learners."""
        shape = self.options(
            "critics", "hidden", "activation", "encoder", "actor", "critic", "normalize_observation", "scale_images"
        )
        networks = _Networks(self.observation_space, self.action_space, generator, tree=self.value is not None, **shape)
        if self.value is None:
            observations = networks.preprocess, self.observation_space, generator, self.encoder, self.scale_images
            size = networks.preprocess.features, Layers(tuple(self.hidden), self.activation, generator)
            privileged = networks.preprocess.privileged
            networks.state_value = StateValue(*size, encoder_of(*observations), privileged=privileged)
        else:
            spaces = self.observation_space, self.action_space
            networks.state_value = CustomValue(CustomModules(*spaces, generator, networks.preprocess), self.value)
        self._critics = self.add_learner("critics", networks.critics, critic_loss)
        self._value = self.add_learner("value", networks.state_value, expectile_loss)
        self._actor = self.add_learner("actor", networks.actor, likelihood_loss)
        self.follow(networks.target_critics, networks.critics)
        return networks

    def act(self, observation: Tree, explore: bool | float) -> Tensor:
        """Return the tanh of the mean, scaled to the bounds, or a sample if `explore` is set; (N, ...)."""
        return self.networks.act(observation, self.generator if explore else None)

    def update_from(self, sample: Sample, weight_B: Tensor | None, report: bool) -> tuple[dict[str, Tensor], Tensor]:
        """Update the state value, the actor and the critics with a batch."""
        networks = self.networks
        features, next_features = networks.preprocess(sample.observation), networks.preprocess(sample.next_observation)
        action_BA = networks.scale.from_action(sample.action)
        q_B = self._q_values(features, action_BA)
        metrics = self._value.step(Batch(features, target=q_B, weight=weight_B), self.expectile, report=report)
        value_B, next_value_B = self._values(features, next_features)
        advantage_B = q_B - value_B
        imitation_B = (advantage_B * self.inverse_temperature).exp_()
        imitation_B = imitation_B.clamp_(max=self.max_weight)
        target_B = td_target(sample.reward, sample.terminated, next_value_B, sample.discount)
        recorded = Batch(features, action_BA, weight=imitation_B if weight_B is None else imitation_B * weight_B)
        metrics |= self._actor.step(recorded, None, report=report)
        metrics |= self._critics.step(Batch(features, action_BA, target=target_B, weight=weight_B), None, report=report)
        if report:
            metrics |= {"advantage": advantage_B.mean(), "largest_weight": imitation_B.amax()}
        metrics.pop("error")
        return metrics, metrics.pop("td_error")

    @torch.no_grad()
    def _q_values(self, features: Features, action_BA: Tensor) -> Tensor:
        return self.networks.target_critics(features, action_BA).amin(0)

    @torch.no_grad()
    def _values(self, features: Features, next_features: Features) -> tuple[Tensor, ...]:
        both = map_tree(lambda *parts: torch.cat(parts), features, next_features)
        return self.networks.state_value(both).chunk(2)


class _Networks(ContinuousNetworks):
    state_value: StateValue | CustomValue


def expectile_loss(
    value: StateValue, batch: Batch, tau: float | Tensor, *, report: bool = True
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the expectile loss mean w `|tau - [e < 0]| e^2` of e = y - V(s).

    Source: Kostrikov et al. 2022 (IQL), equation 5.
    """
    value_B = value(batch.features)
    loss_B = expectile(batch.target - value_B, tau)  # type: ignore[arg-type]  # a tensor if compiled
    loss = (loss_B if batch.weight is None else loss_B * batch.weight).mean()
    return loss, {"value_loss": loss.detach(), "value": value_B.detach().mean()} if report else {}
