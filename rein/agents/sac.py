"""Soft actor-critic.

Shapes: K critics, B rows of a batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rein.agents.base.soft_actor_critic import ContinuousSoftActorCritic, mean_actor_loss, soft_actor_loss
from rein.networks.off_policy import ContinuousNetworks
from rein.options import at_least_one, option


class SAC(ContinuousSoftActorCritic):
    """Soft actor-critic (Haarnoja et al. 2018): maximizes expected return plus entropy.

    Targets and losses::

        y    = r + gamma * (min_k Q'_k(s', a') - alpha * log pi(a' | s')),  a' ~ pi(s'),  or r at a terminal state
        L_Q  = sum_k mean (Q_k(s, a) - y)^2 / 2
        L_pi = mean (alpha * log pi(a | s) - min_k Q_k(s, a)),  a ~ pi(s)
        L_a  = mean -log alpha * (log pi(a | s) + target_entropy)

    With `target_subset`, each target takes the minimum over that many random critics, and L_pi the mean over all of
    them instead of the minimum (REDQ, Chen et al. 2021).

    The target networks Q' move toward the K critics by `tau`. Critics receive actions scaled to [-1, 1]. Log
    probabilities refer to scaled actions too, so `target_entropy` does not depend on the bounds of the action space.

    Observations are flattened. The entry `critic_observation` of a Dict observation is an input of the critics only.
    The action space must be a Box with finite bounds.
    """

    target_subset: int | None = option(
        default=None,
        check=at_least_one,
        fixed=True,
        help="random critics of each target, for ensembles (Chen et al. 2021); None for all",
    )

    def build_networks(self, generator: torch.Generator) -> ContinuousNetworks:
        """Build the actor, critics, target critics, temperature and their learners."""
        if self.target_subset is not None and self.target_subset > self.critics:
            raise ValueError(f"SAC(target_subset={self.target_subset}): give at most critics={self.critics}")
        return self.soft_networks(generator, soft_actor_loss if self.target_subset is None else mean_actor_loss)

    def lowest(self, value_KB: Tensor) -> Tensor:
        """Return the smallest value of each row, (B,), of all critics or of a random subset."""
        if self.target_subset is None:
            return value_KB.amin(0)
        order_K = torch.randperm(self.critics, generator=self.generator, device=self.device)
        return value_KB[order_K[: self.target_subset]].amin(0)
