"""An actor and critics of discrete actions.

Shapes: K critics, B rows, F features of an observation, A actions, H hidden features.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor, nn

from rein.networks.encoder import Encoder, StemFactory, features_of, stem_for, through
from rein.networks.heads import DiscreteHead
from rein.networks.mlp import Stack, orthogonal_linear
from rein.ops.distributions import Distribution


class ActionValues(nn.Module):
    """K independent critics that say what each action is worth, evaluated as one: (B, F) -> (K, B, A)."""

    def __init__(
        self,
        members: int,
        features: int,
        actions: int,
        hidden: Sequence[int],
        activation: str,
        generator: torch.Generator,
        *,
        stem: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.stem = stem
        self.hidden = Stack(members, features_of(stem, features), hidden, activation, generator)
        heads = [orthogonal_linear(self.hidden.features, actions, 1.0, generator) for _ in range(members)]
        self.weight = nn.Parameter(torch.stack([head.weight.detach().t() for head in heads]))  # (K, H, A)
        self.bias = nn.Parameter(torch.stack([head.bias.detach().unsqueeze(0) for head in heads]))  # (K, 1, A)

    def forward(self, x_BF: Tensor) -> Tensor:
        """(K, B, A)."""
        return torch.baddbmm(self.bias, self.hidden(through(self.stem, x_BF)), self.weight)


class DiscreteActor(nn.Module):
    """(B, F) -> a distribution over actions."""

    def __init__(
        self,
        features: int,
        space: spaces.Discrete,
        hidden: Sequence[int],
        activation: str,
        generator: torch.Generator,
        *,
        stem: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.stem = stem
        self.hidden = Stack(1, features_of(stem, features), hidden, activation, generator)
        self.head = DiscreteHead(self.hidden.features, space, 0.01, generator)

    def forward(self, x_BF: Tensor) -> Distribution:
        """Categorical."""
        return self.head(self.hidden(through(self.stem, x_BF))[0])


class DiscreteNetworks(nn.Module):
    """All that an agent of discrete actions learns by an actor, K critics, and slower copies of these as targets."""

    carry_size = 0

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        generator: torch.Generator,
        *,
        critics: int,
        hidden: Sequence[int],
        activation: str,
        normalize_observation: bool,
        scale_images: bool,
        stem: StemFactory | None = None,
    ) -> None:
        """`stem` is that of `stem_for`: the actor has one and the critics another.

        Raises ValueError for images without one, and for actions that are not Discrete.
        """
        super().__init__()
        if not isinstance(action_space, spaces.Discrete):
            raise ValueError(f"the action space is {action_space}; this agent chooses among Discrete actions")
        scaling = {"scale_images": scale_images, "own_stem": stem is not None}
        self.encoder = Encoder(observation_space, generator.device, normalize=normalize_observation, **scaling)
        if self.encoder.images and stem is None:
            raise ValueError(
                f"there are images in {observation_space}: this agent learns from vectors, or give it a stem="
            )
        features, shape = self.encoder.features, (hidden, activation, generator)
        own = stem_for(observation_space, generator, stem)
        self.actor = DiscreteActor(features, action_space, *shape, stem=own)
        own = stem_for(observation_space, generator, stem)
        self.critics = ActionValues(critics, features, int(action_space.n), *shape, stem=own)
        self.target_critics = copy.deepcopy(self.critics).requires_grad_(False)

    @property
    def policy_head(self) -> DiscreteHead:
        """What makes actions of samples."""
        return self.actor.head

    def policy(self, x_BF: Tensor, carry: Tensor | None = None) -> tuple[Distribution, Tensor | None]:
        """The distribution over actions, and the carry, of which there is none."""
        return self.actor(x_BF), carry
