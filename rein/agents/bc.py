"""Behaviour cloning.

Shapes: N environments, B rows of a batch, A action dimensions or number of actions.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from gymnasium import spaces
from torch import Tensor, nn

from rein.agents.base.imitation import likelihood_loss, weighted_mean
from rein.agents.base.learner import Batch
from rein.agents.base.replay_agent import DiscreteActions, ReplayAgent
from rein.networks.encoder import inputs_of
from rein.networks.heads import check_bounded
from rein.networks.off_policy import Actor, ContinuousNetworks
from rein.networks.q_networks import QNetwork
from rein.ops.exploration import boltzmann
from rein.ops.values import nonempty_mask
from rein.options import flag, option
from rein.replay.replay import Sample
from rein.types import Tree


class BC(DiscreteActions, ReplayAgent):
    """Behaviour cloning (Pomerleau 1988): imitates recorded actions.

    Loss::

        L = mean -log pi(a | s),  or mean |mu(s) - a|^2 for continuous actions without `stochastic`

    The policy is a categorical distribution for discrete actions and a squashed Gaussian for continuous actions.
    `rein.offline_loop` trains BC on recorded data. Rewards, episode ends and next observations are ignored.

    Observations are flattened; images require Discrete actions or an `encoder`. The action space must be Discrete, or a
    Box with finite bounds. The entry `action_mask` of a Dict observation masks invalid Discrete actions.
    """

    learning_starts: int = option(default=0)
    stochastic: bool = option(
        default=True, check=flag, fixed=True, help="fit a distribution of continuous actions; False fits the mean only"
    )

    reports = ("actor_loss", "grad_norm")
    values = False

    @classmethod
    def check_spaces(cls, observation_space: spaces.Space[Any], action_space: spaces.Space[Any]) -> None:
        """Raise ValueError unless the action space is Discrete, or a Box of floating-point numbers with bounds."""
        if not isinstance(action_space, spaces.Discrete):
            check_bounded(action_space)

    def build_networks(self, generator: torch.Generator) -> nn.Module:
        """Build the actor and its learner."""
        self._discrete = isinstance(self.action_space, spaces.Discrete)
        shape = self.options("hidden", "activation", "encoder", "normalize_observation", "scale_images")
        arguments = (self.observation_space, self.action_space, generator)
        if self._discrete:
            networks: nn.Module = QNetwork(*arguments, **shape, layer_norm=False)
            self._learner = self.add_learner("actor", networks, cross_entropy_loss)
            return networks
        networks = (ContinuousNetworks if self.stochastic else _MeanNetworks)(*arguments, critics=0, **shape)
        loss = likelihood_loss if self.stochastic else squared_action_loss
        self._learner = self.add_learner("actor", networks.actor, loss)
        return networks

    def act(self, observation: Tree, explore: bool | float) -> Tensor:
        """Return the most probable action or the mean action, or a sample if `explore` is set; (N, ...)."""
        networks = self.networks
        if self._discrete:
            logits_NA = networks(networks.preprocess(observation))
            index_N = boltzmann(logits_NA, 1.0, self.generator) if explore else logits_NA.argmax(1)
            return index_N + self.first_action
        if self.stochastic:
            return networks.act(observation, self.generator if explore else None)
        return networks.scale.to_action(networks.actor.action(networks.preprocess(observation)))

    def update_from(self, sample: Sample, weight_B: Tensor | None, report: bool) -> tuple[dict[str, Tensor], Tensor]:
        """Update the actor with a batch."""
        networks = self.networks
        action = self.network_action(sample.action) if self._discrete else networks.scale.from_action(sample.action)
        features = networks.preprocess(sample.observation)
        if (mask_BA := inputs_of(features).action_mask) is not None:
            _check_allowed(mask_BA, action)
        batch = Batch(features, action, weight=weight_B)
        metrics = self._learner.step(batch, None, report=report)
        return metrics, metrics.pop("error")


def _check_allowed(mask_BA: Tensor, action_B: Tensor) -> None:
    """Raise ValueError if a recorded action is not valid. A row without a valid action counts as unmasked."""
    if not bool(nonempty_mask(mask_BA).gather(1, action_B.unsqueeze(1)).all()):
        raise ValueError("BC: the data contains actions that are not valid according to their action_mask")


class _MeanNetworks(ContinuousNetworks):
    """Networks with an actor that returns the mean action only."""

    stochastic = False


def squared_action_loss(
    actor: Actor, batch: Batch, coefficients: None, *, report: bool = True
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute mean w `|mu(s) - a|^2` of a deterministic actor. The metrics contain the squared errors `error` (B,)."""
    error_B = (actor.action(batch.features) - batch.action).square().sum(1)
    return weighted_mean(error_B, error_B, batch.weight, report)


def cross_entropy_loss(
    networks: nn.Module, batch: Batch, coefficients: None, *, report: bool = True
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute mean -w log pi(a | s) of Discrete actions from logits. The metrics contain -log pi as `error` (B,)."""
    error_B = F.cross_entropy(networks(batch.features), batch.action, reduction="none")
    return weighted_mean(error_B, error_B, batch.weight, report)
