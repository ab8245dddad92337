"""Actors and critics of continuous actions, and values of states.

Shapes: K critics, B rows, F features of an observation, A dimensions of an action.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from rein.networks.encoder import Encoder, StemFactory, features_of, stem_for, through
from rein.networks.flatten import Tree
from rein.networks.heads import has_width
from rein.networks.mlp import Stack, orthogonal_linear
from rein.ops.distributions import SquashedNormal

LOG_STD = (-20.0, 2.0)  # the least and the largest that an actor says


class Scale(nn.Module):
    """Between actions of a Box, (N, A) or of further dimensions, and what networks see: (N, A) from -1 to 1."""

    low: Tensor
    high: Tensor

    def __init__(self, space: spaces.Space[Any], device: torch.device) -> None:
        """Raises ValueError for a space without finite bounds, low < high and high - low finite in float32."""
        super().__init__()
        if not isinstance(space, spaces.Box) or not has_width(space):
            raise ValueError(
                f"the action space is {space}; continuous actions need a Box with finite bounds, low < high and"
                " high - low finite in float32"
            )
        if not space.shape or 0 in space.shape or not np.issubdtype(space.dtype, np.floating):
            raise ValueError(f"the action space is {space}; continuous actions are one or more floating-point numbers")
        self.shape, self.actions = space.shape, int(np.prod(space.shape))
        for name, bound in (("low", space.low), ("high", space.high)):
            self.register_buffer(name, torch.as_tensor(bound, dtype=torch.float32, device=device).flatten(), False)

    def to_action(self, x_NA: Tensor) -> Tensor:
        """The action in the space's own units and shape."""
        action = torch.lerp(self.low, self.high, (x_NA + 1.0) * 0.5)
        return action if len(self.shape) == 1 else action.unflatten(1, self.shape)

    def from_action(self, action: Tensor) -> Tensor:
        """What stands for an action."""
        return (action.flatten(1) - self.low) * (2.0 / (self.high - self.low)) - 1.0


class Actor(nn.Module):
    """An observation -> an action, or the mean and the logarithm of the deviation of a Gaussian that is squashed."""

    def __init__(
        self,
        features: int,
        actions: int,
        hidden: Sequence[int],
        activation: str,
        generator: torch.Generator,
        *,
        stochastic: bool,
        stem: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.stem = stem
        self.stochastic = stochastic
        self.hidden = Stack(1, features_of(stem, features), hidden, activation, generator)
        self.head = orthogonal_linear(self.hidden.features, actions * (1 + stochastic), 0.01, generator)
        bound = torch.ones(actions, dtype=torch.float32, device=generator.device)
        self.register_buffer("bound", bound, persistent=False)

    def forward(self, x_BF: Tensor) -> Tensor:
        """What the last layer says, (B, A) or (B, 2 A)."""
        return self.head(self.hidden(through(self.stem, x_BF))[0])

    def action(self, x_BF: Tensor) -> Tensor:
        """Of an actor that is not stochastic: (B, A)."""
        return self(x_BF).tanh()

    def distribution(self, x_BF: Tensor) -> SquashedNormal:
        """Of a stochastic one, over (B, A)."""
        mean, log_std = self(x_BF).chunk(2, -1)
        return SquashedNormal(mean, log_std.clamp(*LOG_STD), -self.bound, self.bound)  # type: ignore[operator, arg-type]  # a buffer is a Tensor


class Critics(nn.Module):
    """K independent critics of an observation and an action, evaluated as one.

    They are drawn one after the other under `generator`, so no two are alike. A stem looks at observations for all of
    them, before the action is put beside what it says.
    """

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
        self.members, self.stem = members, stem
        self.hidden = Stack(members, features_of(stem, features) + actions, hidden, activation, generator)
        heads = [orthogonal_linear(self.hidden.features, 1, 1.0, generator) for _ in range(members)]
        self.weight = nn.Parameter(torch.stack([head.weight.detach() for head in heads]))  # (K, 1, H)
        self.bias = nn.Parameter(torch.stack([head.bias.detach() for head in heads]))  # (K, 1)

    def forward(self, x_BF: Tensor, action_BA: Tensor) -> Tensor:
        """The values (K, B)."""
        h_KBH = self.hidden(torch.cat((through(self.stem, x_BF), action_BA), 1))
        return torch.baddbmm(self.bias.unsqueeze(-1), h_KBH, self.weight.mT).squeeze(-1)

    def frozen(self, x_BF: Tensor, action_BA: Tensor, members: int | None = None) -> Tensor:
        """The values by the first `members`, with a gradient toward the action alone: half the work on the way back."""
        parameters = (*self.hidden.layers, self.weight, self.bias)
        *layers, weight, bias = (parameter.detach()[:members] for parameter in parameters)
        with torch.no_grad():  # what a stem says does not depend on the action
            seen = through(self.stem, x_BF)
        x = torch.cat((seen, action_BA), 1)
        # without hidden layers, `through` would not know how many members were asked for
        h_KBH = self.hidden.through(x, layers) if layers else x.expand(len(weight), *x.shape)
        return torch.baddbmm(bias.unsqueeze(-1), h_KBH, weight.mT).squeeze(-1)


class ContinuousNetworks(nn.Module):
    """All that an agent of continuous actions learns: an actor, K critics, and slower copies of these as targets."""

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        generator: torch.Generator,
        *,
        critics: int,
        stochastic: bool,
        hidden: Sequence[int],
        activation: str,
        normalize_observation: bool,
        scale_images: bool,
        stem: StemFactory | None = None,
    ) -> None:
        """`stem` is that of `stem_for`: the actor has one and the critics another.

        Raises ValueError for images without one, and for actions without finite bounds.
        """
        super().__init__()
        self.scale = Scale(action_space, generator.device)
        scaling = {"scale_images": scale_images, "own_stem": stem is not None}
        self.encoder = Encoder(observation_space, generator.device, normalize=normalize_observation, **scaling)
        if self.encoder.images and stem is None:
            raise ValueError(
                f"there are images in {observation_space}: this agent learns from vectors, or give it a stem="
            )
        shape = self.encoder.features, self.scale.actions, tuple(hidden), activation, generator
        self.actor = Actor(*shape, stochastic=stochastic, stem=stem_for(observation_space, generator, stem))
        self.critics = Critics(critics, *shape, stem=stem_for(observation_space, generator, stem))
        self.target_critics = copy.deepcopy(self.critics).requires_grad_(False)

    def act(self, observation: Tree, generator: torch.Generator | None) -> Tensor:
        """Return actions (N, *A) of a stochastic actor: samples, or modes if there is no generator."""
        distribution = self.actor.distribution(self.encoder(observation))
        sample = distribution.mode() if generator is None else distribution.sample(generator)
        return self.scale.to_action(sample.tanh())


class DeterministicNetworks(ContinuousNetworks):
    """With an actor that is not stochastic, and a slower copy of it too."""

    def __init__(self, *spaces_and_generator: Any, **shape: Any) -> None:
        """As `ContinuousNetworks`, but for `stochastic`."""
        super().__init__(*spaces_and_generator, **shape, stochastic=False)
        self.target_actor = copy.deepcopy(self.actor).requires_grad_(False)


class StateValue(nn.Module):
    """An observation -> V(s), by a perceptron whose parameters are drawn under `generator`."""

    def __init__(
        self,
        features: int,
        hidden: Sequence[int],
        activation: str,
        generator: torch.Generator,
        *,
        stem: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.stem = stem
        self.hidden = Stack(1, features_of(stem, features), hidden, activation, generator)
        self.head = orthogonal_linear(self.hidden.features, 1, 1.0, generator)

    def forward(self, x_BF: Tensor) -> Tensor:
        """(B,)."""
        return self.head(self.hidden(through(self.stem, x_BF))[0]).squeeze(-1)
