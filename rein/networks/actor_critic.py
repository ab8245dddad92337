"""A policy and a value for every observation, with separate networks or one that both look through.

Shapes: B rows, F features of an observation, H hidden features.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor, nn

from rein.networks.heads import action_head
from rein.networks.mlp import MLP, orthogonal_linear
from rein.ops.distributions import Distribution


class ActorCritic(nn.Module):
    """What a policy-gradient agent learns: (B, F) -> a distribution over actions and a value (B,)."""

    def __init__(
        self,
        features: int,
        action_space: spaces.Space[Any],
        generator: torch.Generator,
        *,
        hidden: Sequence[int] = (64, 64),
        activation: str = "tanh",
        shared: bool = False,
        squash: bool = False,
        log_std: float = 0.0,
    ) -> None:
        """`shared` has actor and critic look through one network; `squash` and `log_std` are for continuous actions."""
        super().__init__()
        self.actor = MLP(features, hidden, activation, generator)
        self.critic = None if shared else MLP(features, hidden, activation, generator)
        self.policy_head = action_head(self.actor.features, action_space, generator, squash=squash, log_std=log_std)
        self.value_head = orthogonal_linear(self.actor.features, 1, 1.0, generator)

    def forward(self, x_BF: Tensor) -> tuple[Distribution, Tensor]:
        """The distribution over actions, and the value (B,)."""
        hidden_BH = self.actor(x_BF)
        seen_BH = hidden_BH if self.critic is None else self.critic(x_BF)
        return self.policy_head(hidden_BH), self.value_head(seen_BH).squeeze(-1)

    def policy(self, x_BF: Tensor) -> Distribution:
        """The distribution over actions alone."""
        return self.policy_head(self.actor(x_BF))

    def value(self, x_BF: Tensor) -> Tensor:
        """The value (B,) alone."""
        return self.value_head((self.critic or self.actor)(x_BF)).squeeze(-1)
