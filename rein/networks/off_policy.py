"""Actors, critics and target critics of off-policy agents.

Shapes: N environments, B rows, F features of an observation, K networks, H hidden features, A dimensions of an action
or Discrete actions.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from rein.networks.encoder import EncoderFactory, NetworkFactory, Preprocessor, encoder_for, features_of, through
from rein.networks.heads import DiscreteHead, check_bounded, count_actions
from rein.networks.mlp import Stack, orthogonal_linear
from rein.networks.observations import Features, Tree, inputs_of
from rein.ops.distributions import Distribution, SquashedNormal
from rein.ops.values import nonempty_mask

LOG_STD = (-20.0, 2.0)  # range of an actor's log standard deviation


class Scale(nn.Module):
    """Scaling between actions of a Box, (N, A) or more dimensions, and their network form, (N, A) in [-1, 1]."""

    low: Tensor
    high: Tensor

    def __init__(self, space: spaces.Space[Any], device: torch.device) -> None:
        """Create the scaling. Raises ValueError for a space that `check_bounded` refuses."""
        super().__init__()
        box = check_bounded(space)
        self.shape, self.actions = box.shape, int(np.prod(box.shape))
        for name, bound in (("low", box.low), ("high", box.high)):
            self.register_buffer(name, torch.as_tensor(bound, dtype=torch.float32, device=device).flatten(), False)

    def to_action(self, x_NA: Tensor) -> Tensor:
        """Convert to an action in the units and shape of the space."""
        action = torch.lerp(self.low, self.high, (x_NA + 1.0) * 0.5)
        return action if len(self.shape) == 1 else action.unflatten(1, self.shape)

    def from_action(self, action: Tensor) -> Tensor:
        """Convert an action to its network form, in [-1, 1]."""
        return (action.flatten(1) - self.low) * (2.0 / (self.high - self.low)) - 1.0


class Actor(nn.Module):
    """Network from an observation to an action, or to mean and log standard deviation of a squashed Gaussian."""

    def __init__(
        self,
        features: int,
        actions: int,
        hidden: Sequence[int],
        activation: str,
        generator: torch.Generator,
        *,
        stochastic: bool,
        encoder: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self.stochastic = stochastic
        self.hidden = Stack(1, features_of(encoder, features), hidden, activation, generator)
        self.head = orthogonal_linear(self.hidden.features, actions * (1 + stochastic), 0.01, generator)
        bound = torch.ones(actions, dtype=torch.float32, device=generator.device)
        self.register_buffer("bound", bound, persistent=False)

    def forward(self, x: Features) -> Tensor:
        """Return the output of the last layer, (B, A) or (B, 2 A)."""
        return self.head(self.hidden(through(self.encoder, inputs_of(x).features))[0])

    def action(self, x: Features) -> Tensor:
        """Return the action of a deterministic actor, (B, A)."""
        return self(x).tanh()

    def distribution(self, x: Features) -> SquashedNormal:
        """Return the distribution of a stochastic actor, over (B, A)."""
        mean, log_std = self(x).chunk(2, -1)
        return SquashedNormal(mean, log_std.clamp(*LOG_STD), -self.bound, self.bound)  # type: ignore[operator, arg-type]  # buffers are tensors


class CustomActor(Actor):
    """Actor from a custom network."""

    def __init__(self, network: nn.Module, actions: int, device: torch.device) -> None:
        nn.Module.__init__(self)
        self.network = network
        self.register_buffer("bound", torch.ones(actions, dtype=torch.float32, device=device), persistent=False)

    def forward(self, x: Any) -> Tensor:
        """Return the output of the network, (B, A) or (B, 2 A)."""
        return self.network(inputs_of(x).features)


def critic_features(encoder: nn.Module | None, x: Features) -> Tensor:
    """Return the features of an observation and, if there is one, of the critic observation, (B, G + C)."""
    inputs = inputs_of(x)
    features_BG = through(encoder, inputs.features)
    return features_BG if inputs.critic is None else torch.cat((features_BG, inputs.critic), 1)


class Critics(nn.Module):
    """K independent critics of an observation and an action, evaluated together.

    All critics share the encoder, which does not depend on the action. `privileged` is the number of features C of a
    critic observation, which the critics receive in addition. Parameters are drawn from `generator` for one critic
    after the other, so no two critics are equal.
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
        encoder: nn.Module | None = None,
        privileged: int = 0,
    ) -> None:
        super().__init__()
        self.members, self.encoder = members, encoder
        inputs = features_of(encoder, features) + privileged + actions
        self.hidden = Stack(members, inputs, hidden, activation, generator)
        heads = [orthogonal_linear(self.hidden.features, 1, 1.0, generator) for _ in range(members)]
        self.weight = nn.Parameter(torch.stack([head.weight.detach() for head in heads]))  # (K, 1, H)
        self.bias = nn.Parameter(torch.stack([head.bias.detach() for head in heads]))  # (K, 1)

    def forward(self, x: Features, action_BA: Tensor) -> Tensor:
        """Return the values (K, B)."""
        h_KBH = self.hidden(torch.cat((critic_features(self.encoder, x), action_BA), 1))
        return torch.baddbmm(self.bias.unsqueeze(-1), h_KBH, self.weight.mT).squeeze(-1)

    def frozen(self, x: Features, action_BA: Tensor, members: int | None = None) -> Tensor:
        """Return the values of the first `members`, with gradients of the action only. Halves the backward pass."""
        parameters = (*self.hidden.layers, self.weight, self.bias)
        *layers, weight, bias = (parameter.detach()[:members] for parameter in parameters)
        with torch.no_grad():  # features of the encoder do not depend on the action
            features = critic_features(self.encoder, x)
        x_BI = torch.cat((features, action_BA), 1)
        # without hidden layers, `through` would not know the number of members
        h_KBH = self.hidden.through(x_BI, layers) if layers else x_BI.expand(len(weight), *x_BI.shape)
        return torch.baddbmm(bias.unsqueeze(-1), h_KBH, weight.mT).squeeze(-1)


class _Parts:
    """Preprocessor and encoders of an actor and its critics, and builder of custom networks.

    With custom networks, or with `tree`, preprocessed observations are not flattened. Raises ValueError for images
    without an encoder.
    """

    custom: Any = None  # the module rein.networks.custom_networks, which most runs do not need

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        generator: torch.Generator,
        encoder: EncoderFactory | None,
        settings: Mapping[str, Any],
        factories: Sequence[NetworkFactory | None],
        tree: bool = False,
    ) -> None:
        self._arguments, self._scale_images = (observation_space, generator, encoder), settings["scale_images"]
        kind: Any = Preprocessor
        if tree or any(factories):
            from rein.networks import custom_networks

            self.custom, kind = custom_networks, custom_networks.TreePreprocessor
        self.preprocess = kind(observation_space, generator.device, **settings, custom_encoder=encoder is not None)
        if self.preprocess.images and encoder is None and not all(factories):
            raise ValueError(
                f"{observation_space} contains images, but this agent learns from vectors: pass an encoder"
            )
        if self.custom is not None:
            self.modules = self.custom.CustomModules(observation_space, action_space, generator, self.preprocess)

    def encoder(self) -> nn.Module | None:
        """Return a new encoder of a default network."""
        if self.custom is not None:
            return self.custom.FlattenedEncoder(*self._arguments, self._scale_images)
        return encoder_for(*self._arguments)


class ContinuousNetworks(nn.Module):
    """Networks of an agent with continuous actions: an actor, K critics, and target copies of the critics."""

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
        encoder: EncoderFactory | None = None,
        actor: NetworkFactory | None = None,
        critic: NetworkFactory | None = None,
        tree: bool = False,
    ) -> None:
        """Create the networks. Actor and critics have separate encoders, from `encoder_for`.

        `actor` and `critic` replace all layers, see `rein.networks.custom_networks`. With one of them, or with `tree`,
        preprocessed observations are not flattened.

        Raises ValueError for images without an encoder, and for actions without finite bounds.
        """
        super().__init__()
        self.scale = Scale(action_space, generator.device)
        settings = {"normalize": normalize_observation, "scale_images": scale_images, "critic": True}
        parts = _Parts(observation_space, action_space, generator, encoder, settings, (actor, critic), tree)
        self.preprocess, actions = parts.preprocess, self.scale.actions
        shape = self.preprocess.features, actions, tuple(hidden), activation, generator
        if actor is None:
            self.actor: Any = Actor(*shape, stochastic=stochastic, encoder=parts.encoder())
        else:
            what = "means and log standard deviations" if stochastic else "actions before tanh"
            network = parts.modules.build("actor", actor, {what: (2, actions * (1 + stochastic))})
            self.actor = CustomActor(network, actions, generator.device)
        if critic is None:
            extra = {"encoder": parts.encoder(), "privileged": self.preprocess.privileged}
            self.critics: Any = Critics(critics, *shape, **extra)
        else:
            self.critics = parts.custom.CustomCritics(parts.modules, critic, critics, actions)
        self.target_critics = copy.deepcopy(self.critics).requires_grad_(False)

    def act(self, observation: Tree, generator: torch.Generator | None) -> Tensor:
        """Return actions `(N, *A)` of a stochastic actor: samples, or modes without a generator."""
        distribution = self.actor.distribution(self.preprocess(observation))
        sample = distribution.mode() if generator is None else distribution.sample(generator)
        return self.scale.to_action(sample.tanh())


class DeterministicNetworks(ContinuousNetworks):
    """Networks with a deterministic actor and a target copy of it."""

    def __init__(self, *spaces_and_generator: Any, **shape: Any) -> None:
        """See `ContinuousNetworks`, which takes the same arguments and `stochastic`."""
        super().__init__(*spaces_and_generator, **shape, stochastic=False)
        self.target_actor = copy.deepcopy(self.actor).requires_grad_(False)


class StateValue(nn.Module):
    """Value network: an observation -> V(s). Parameters are drawn from `generator`.

    `privileged` is the number of features of a critic observation, see `Critics`.
    """

    def __init__(
        self,
        features: int,
        hidden: Sequence[int],
        activation: str,
        generator: torch.Generator,
        *,
        encoder: nn.Module | None = None,
        privileged: int = 0,
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self.hidden = Stack(1, features_of(encoder, features) + privileged, hidden, activation, generator)
        self.head = orthogonal_linear(self.hidden.features, 1, 1.0, generator)

    def forward(self, x: Features) -> Tensor:
        """Return the values (B,)."""
        return self.head(self.hidden(critic_features(self.encoder, x))[0]).squeeze(-1)


class ActionValues(nn.Module):
    """K independent critics of all Discrete actions, evaluated together: (B, F) -> (K, B, A).

    `privileged` is the number of features of a critic observation, see `Critics`.
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
        encoder: nn.Module | None = None,
        privileged: int = 0,
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self.hidden = Stack(members, features_of(encoder, features) + privileged, hidden, activation, generator)
        heads = [orthogonal_linear(self.hidden.features, actions, 1.0, generator) for _ in range(members)]
        self.weight = nn.Parameter(torch.stack([head.weight.detach().t() for head in heads]))  # (K, H, A)
        self.bias = nn.Parameter(torch.stack([head.bias.detach().unsqueeze(0) for head in heads]))  # (K, 1, A)

    def forward(self, x: Features) -> Tensor:
        """Return the values (K, B, A) of all actions, masked or not."""
        return torch.baddbmm(self.bias, self.hidden(critic_features(self.encoder, x)), self.weight)


class DiscreteActor(nn.Module):
    """Network from features (B, F) to a categorical distribution over actions."""

    def __init__(
        self,
        features: int,
        space: spaces.Space[Any],
        hidden: Sequence[int],
        activation: str,
        generator: torch.Generator,
        *,
        encoder: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self.hidden = Stack(1, features_of(encoder, features), hidden, activation, generator)
        self.head = DiscreteHead(self.hidden.features, space, 0.01, generator)

    def forward(self, x: Features) -> Distribution:
        """Return the distribution over valid actions. A row without a valid action counts as unmasked."""
        x_BF, mask_BA, _ = inputs_of(x)
        mask_BA = None if mask_BA is None else nonempty_mask(mask_BA)
        return self.head(self.hidden(through(self.encoder, x_BF))[0], mask_BA)


class DiscreteNetworks(nn.Module):
    """Networks of an agent with Discrete actions: an actor, K critics, and target copies of the critics."""

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
        encoder: EncoderFactory | None = None,
        actor: NetworkFactory | None = None,
        critic: NetworkFactory | None = None,
    ) -> None:
        """Create the networks. Actor and critics have separate encoders, from `encoder_for`.

        `actor` and `critic` replace all layers, see `rein.networks.custom_networks`.

        Raises ValueError for images without an encoder, and for actions that are not Discrete.
        """
        super().__init__()
        actions = count_actions(action_space)
        settings = {"normalize": normalize_observation, "scale_images": scale_images, "masks": True, "critic": True}
        parts = _Parts(observation_space, action_space, generator, encoder, settings, (actor, critic))
        self.preprocess = parts.preprocess
        features, shape = self.preprocess.features, (hidden, activation, generator)
        if actor is None:
            self.actor: Any = DiscreteActor(features, action_space, *shape, encoder=parts.encoder())
        else:
            self.actor = parts.custom.CustomDiscreteActor(parts.modules, actor, action_space, generator)
        if critic is None:
            extra = {"encoder": parts.encoder(), "privileged": self.preprocess.privileged}
            self.critics: Any = ActionValues(critics, features, actions, *shape, **extra)
        else:
            self.critics = parts.custom.CustomActionValues(parts.modules, critic, critics, actions)
        self.target_critics = copy.deepcopy(self.critics).requires_grad_(False)

    @property
    def policy_head(self) -> DiscreteHead:
        """Head that converts samples to actions."""
        return self.actor.head

    def policy(self, x: Features, carry: Tensor | None = None) -> tuple[Distribution, Tensor | None]:
        """Return the distribution over actions, and the carry unchanged."""
        return self.actor(x), carry
