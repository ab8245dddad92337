"""CrossQ: soft actor-critic with batch-renormalized critics and without target networks.

Shapes: K critics, B rows of a batch, A action dimensions.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from rein.agents.base.actor_and_critics import squared_errors
from rein.agents.base.learner import Batch
from rein.agents.base.optimizers import Adam
from rein.agents.base.soft_actor_critic import ContinuousSoftActorCritic
from rein.networks.encoder import Features
from rein.networks.normalized_stacks import BatchRenormStack
from rein.networks.off_policy import ContinuousNetworks, Critics
from rein.ops.trees import map_tree
from rein.ops.values import td_target
from rein.options import option
from rein.replay.replay import Sample
from rein.schedules import Schedule


class CrossQ(ContinuousSoftActorCritic):
    """CrossQ (Bhatt et al. 2024): SAC with batch renormalization in the critics and without target networks.

    Targets and losses::

        Q_k(s, a), Q_k(s', a') = one pass through critic k,  a' ~ pi(s')
        y    = r + gamma * (min_k Q_k(s', a') - alpha * log pi(a' | s')),  or r at a terminal state
        L_Q  = sum_k mean (Q_k(s, a) - y)^2 / 2
        L_pi = mean (alpha * log pi(a | s) - min_k Q_k(s, a)),  a ~ pi(s)

    The pass normalizes by statistics of both halves together, so that a' does not lie outside of the distribution of
    inputs. y carries no gradient. The actor follows critics that normalize by running statistics. The actor and the
    temperature are updated every `actor_frequency` updates. `tau` and `target_frequency` have no effect.

    Observations are flattened. The entry `critic_observation` of a Dict observation is an input of the critics only.
    The action space must be a Box with finite bounds.
    """

    learning_rate: float | Schedule = option(default=1e-3)
    actor_frequency: int = option(default=3)

    @staticmethod
    def default_optimizer(parameters: Iterable[Any]) -> Any:
        """Return Adam with less momentum, as in the paper."""
        return Adam(parameters, betas=(0.5, 0.999))

    def build_networks(self, generator: torch.Generator) -> ContinuousNetworks:
        """Build the actor, critics, temperature and their learners."""
        if self.layer_norm:
            raise ValueError("CrossQ(layer_norm=True): its critics have batch renormalization; remove layer_norm")
        settings: dict[str, Any] = {"critic_stack": BatchRenormStack, "targets": False}
        return self.soft_networks(generator, critic_loss=crossed_critic_loss, **settings)

    def update_critics(
        self, sample: Sample, batch: Batch, next_features: Features, noise_BA: Tensor, alpha: Tensor, report: bool
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Update the critics with one pass for both observations. Returns metrics and the errors (B,)."""
        ended_B = sample.terminated  # their next observations may contain NaN, which batch statistics would spread
        next_features = map_tree(
            lambda after, before: torch.where(ended_B.view(-1, *[1] * (before.ndim - 1)), before, after),
            next_features,
            batch.features,
        )
        with torch.no_grad():
            action_BA, log_prob_B = self.next_actions(next_features, noise_BA)
        after = {"features": next_features, "action": action_BA, "entropy": -alpha * log_prob_B}
        after |= {"reward": sample.reward, "terminated": ended_B}
        after["discount"] = torch.as_tensor(sample.discount, dtype=torch.float32, device=self.device).expand_as(
            sample.reward
        )
        metrics = self._critics.step(batch._replace(sample=after), None, report=report)
        return metrics, metrics.pop("td_error")

    def step_actor(
        self, batch: Batch, alpha: Tensor, target_entropy: float | Tensor, report: bool
    ) -> dict[str, Tensor]:
        """Update the actor and the temperature. The critics are in evaluation mode meanwhile."""
        trained = [part for part in self.networks.critics.modules() if part.training]
        for part in trained:
            part.training = False
        metrics = super().step_actor(batch, alpha, target_entropy, report)
        for part in trained:
            part.training = True
        return metrics


def crossed_critic_loss(
    critics: Critics, batch: Batch, coefficients: None, *, report: bool = True
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute half the mean squared error, summed over critics, with targets from the same pass.

    `batch.sample` has what follows the recorded actions: features, action, entropy, reward, terminated and discount.
    The metrics contain the mean absolute error of each row as `td_error` (B,).

    Source: Bhatt et al. 2024, equation 1 and figure 2.
    """
    after = batch.sample
    features = map_tree(lambda *parts: torch.cat(parts), batch.features, after["features"])
    value_KB, next_value_KB = critics(features, torch.cat((batch.action, after["action"]))).chunk(2, 1)
    next_value_B = next_value_KB.detach().amin(0) + after["entropy"]
    target_B = td_target(after["reward"], after["terminated"], next_value_B, after["discount"])
    return squared_errors(value_KB, batch._replace(target=target_B), report)
