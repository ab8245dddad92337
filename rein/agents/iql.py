"""Implicit Q-learning.

Shapes: K critics, N environments, B rows of a batch, A action dimensions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rein.agents.base.imitation import ImitatingAgent, likelihood_loss
from rein.agents.base.learner import Batch
from rein.networks.custom_networks import CustomModules, CustomValue, encoder_of
from rein.networks.encoder import Features, NetworkFactory
from rein.networks.off_policy import ContinuousNetworks, Layers, StateValue
from rein.ops.losses import expectile
from rein.ops.trees import map_tree
from rein.options import in_unit_interval, not_negative, option
from rein.replay.replay import Sample


def _between_zero_and_one(value: Any) -> float:
    if not 0.0 < in_unit_interval(value) < 1.0:
        raise ValueError("give a number above 0 and below 1")
    return float(value)


class IQL(ImitatingAgent):
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

    expectile: float = option(
        default=0.7,
        check=_between_zero_and_one,
        fixed=True,
        help="expectile of the values of recorded actions: 0.5 is the mean, values near 1 approach the maximum",
    )
    inverse_temperature: float = option(
        default=3.0, check=not_negative, fixed=True, help="factor of the advantage in the exponent; 0 clones behaviour"
    )
    value: NetworkFactory | None = option(
        default=None,
        fixed=True,
        help="factory (observation_space, action_space, generator) of a custom state value; forward(observation) "
        "returns the values",
    )

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

    def build_networks(self, generator: torch.Generator) -> ContinuousNetworks:
        """Build the actor, critics, target critics, state value and their learners."""
        networks = self.actor_and_critics(ContinuousNetworks, generator, likelihood_loss, tree=self.value is not None)
        preprocess = networks.preprocess
        if self.value is None:
            encoder = encoder_of(preprocess, self.observation_space, generator, self.encoder, self.scale_images)
            layers = Layers(tuple(self.hidden), self.activation, generator)
            value: Any = StateValue(preprocess.features, layers, encoder, privileged=preprocess.privileged)
        else:
            modules = CustomModules(self.observation_space, self.action_space, generator, preprocess)
            value = CustomValue(modules, self.value)
        networks.state_value = value
        self._value = self.add_learner("value", value, expectile_loss)
        return networks

    def update_from(self, sample: Sample, weight_B: Tensor | None, report: bool) -> tuple[dict[str, Tensor], Tensor]:
        """Update the state value, the critics and the actor with a batch."""
        batch, next_features = self.recorded(sample, weight_B)
        q_B = self._q_values(batch)
        metrics = self._value.step(batch._replace(target=q_B), self.expectile, report=report)
        value_B, next_value_B = self._values(batch.features, next_features)
        critic_metrics, error_B = self.step_critics(sample, batch, next_value_B, report)
        advantage_B = q_B - value_B
        imitation_B = (advantage_B * self.inverse_temperature).exp_()
        return metrics | self.imitate(batch, advantage_B, imitation_B, report) | critic_metrics, error_B

    @torch.no_grad()
    def _q_values(self, batch: Batch) -> Tensor:
        return self.networks.target_critics(batch.features, batch.action).amin(0)

    @torch.no_grad()
    def _values(self, features: Features, next_features: Features) -> tuple[Tensor, ...]:
        both = map_tree(lambda *parts: torch.cat(parts), features, next_features)
        return self.networks.state_value(both).chunk(2)


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
