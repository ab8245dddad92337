"""Soft actor-critic for discrete actions.

Shapes: K critics, N environments, B rows of a batch, A actions.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from rein.agents.base.actor_and_critics import squared_errors
from rein.agents.base.learner import Batch
from rein.agents.base.replay_agent import DiscreteActions
from rein.agents.base.soft_actor_critic import SoftActorCritic
from rein.networks.encoder import Features, inputs_of
from rein.networks.off_policy import ActionValues, DiscreteActor, DiscreteNetworks
from rein.ops.values import nonempty_mask
from rein.replay.replay import Sample
from rein.types import Tree


class DiscreteSAC(DiscreteActions, SoftActorCritic):
    """Soft actor-critic for A discrete actions (Christodoulou 2019): expectations over actions are exact sums.

    Targets and losses::

        V(s) = sum_a pi(a | s) (min_k Q'_k(s, a) - alpha log pi(a | s))
        y    = r + gamma V(s'),  or r at a terminal state
        L_Q  = sum_k mean (Q_k(s, a) - y)^2 / 2
        L_pi = mean sum_a pi(a | s) (alpha log pi(a | s) - min_k Q_k(s, a))
        L_a  = mean sum_a -pi(a | s) log alpha (log pi(a | s) + target_entropy)

    Observations are flattened. The action space must be Discrete. Action masks are supported: sums are over the valid
    actions. By default, the target entropy of a state with n valid actions is then log(n) / 2, and its mean over the
    batch replaces target_entropy in L_a. The entry `critic_observation` of a Dict observation is an input of the
    critics only.
    """

    def build_networks(self, generator: torch.Generator) -> DiscreteNetworks:
        """Build the actor, critics, target critics, temperature and their learners."""
        networks = self.actor_and_critics(DiscreteNetworks, generator, actor_loss, critic_loss=critic_loss)
        self.add_temperature(networks, 0.5 * math.log(int(self.action_space.n)))
        return networks

    def act(self, observation: Tree, explore: bool | float) -> Tensor:
        """Return the most probable action, or a sample if `explore` is set; (N,)."""
        networks = self.networks
        distribution = networks.actor(networks.preprocess(observation))
        sample = distribution.sample(self.generator) if explore else distribution.mode()
        return networks.policy_head.to_action(distribution, sample)

    def update_from(self, sample: Sample, weight_B: Tensor | None, report: bool) -> tuple[dict[str, Tensor], Tensor]:
        """Update the critics, the actor and the temperature with a batch."""
        batch, next_x = self.recorded(sample, weight_B)
        alpha = self.networks.temperature.log.detach().exp()
        metrics, error_B = self.step_critics(sample, batch, self._next_values(next_x, alpha), report)
        target_entropy = self._target_entropy_of(inputs_of(batch.features).action_mask)
        metrics = self.step_actor(batch, alpha, target_entropy, report) | metrics
        return (metrics | {"temperature": alpha}) if report else metrics, error_B

    @torch.no_grad()
    def _next_values(self, next_x: Features, alpha: Tensor) -> Tensor:
        prob_BA, log_prob_BA = _probabilities(self.networks.actor, next_x)
        value_BA = self.networks.target_critics(next_x).amin(0) - alpha * log_prob_BA
        return (prob_BA * value_BA).sum(1)

    def _target_entropy_of(self, mask_BA: Tensor | None) -> float | Tensor:
        """Return the mean target entropy of states with these masks."""
        if mask_BA is None or self.target_entropy is not None:
            return self._target_entropy
        return 0.5 * nonempty_mask(mask_BA).sum(1).float().log().mean()


def _probabilities(actor: DiscreteActor, x: Features) -> tuple[Tensor, Tensor]:
    """Return the probabilities and log probabilities (B, A). The latter are 0 for masked actions."""
    log_prob_BA = actor(x).log_probs
    prob_BA = log_prob_BA.exp()
    if inputs_of(x).action_mask is not None:  # alpha times their log probability could overflow
        log_prob_BA = log_prob_BA.masked_fill(prob_BA == 0.0, 0.0)
    return prob_BA, log_prob_BA


def critic_loss(
    critics: ActionValues, batch: Batch, coefficients: None, *, report: bool = True
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute half the mean squared error, summed over critics.

    The metrics contain the mean absolute error of each row as `td_error` (B,).
    """
    value_KBA = critics(batch.features)
    action_KB1 = batch.action.view(1, -1, 1).expand(len(value_KBA), -1, 1)
    return squared_errors(value_KBA.gather(2, action_KB1).squeeze(2), batch, report)


def actor_loss(
    actor: DiscreteActor, batch: Batch, coefficients: Any, *, report: bool = True
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute mean sum_a pi(a | s) (alpha log pi(a | s) - min_k Q_k(s, a)).

    The metrics contain the expected log probability of each row as `log_prob` (B,).
    """
    critics, alpha = coefficients
    with torch.no_grad():
        value_BA = critics(batch.features).amin(0)
    prob_BA, log_prob_BA = _probabilities(actor, batch.features)
    loss = (prob_BA * (alpha * log_prob_BA - value_BA)).sum(1).mean()
    log_prob_B = (prob_BA * log_prob_BA).sum(1).detach()
    metrics = {"log_prob": log_prob_B}
    if report:
        metrics |= {"actor_loss": loss.detach(), "entropy": -log_prob_B.mean()}
    return loss, metrics
