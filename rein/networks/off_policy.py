"""Actors, critics and target critics of off-policy agents.

Shapes: N environments, B rows, F features of an observation, K networks, H hidden features, A dimensions of an action
or Discrete actions.
"""

from __future__ import annotations

import abc
import copy
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from rein.networks.encoder import (
    EncoderFactory,
    Features,
    NetworkFactory,
    Preprocessor,
    encoder_for,
    features_of,
    inputs_of,
    through,
)
from rein.networks.heads import DiscreteHead, check_bounded, count_actions
from rein.networks.mlp import Stack, orthogonal_linear
from rein.ops.distributions import Distribution, SquashedNormal
from rein.ops.values import nonempty_mask
from rein.types import Tree

LOG_STD = (-20.0, 2.0)  # range of an actor's log standard deviation


class Scale(nn.Module):
    """Scaling between actions of a Box, (N, A) or more dimensions, and their network form, (N, A) in [-1, 1]."""

    low: Tensor
    high: Tensor

    def __init__(self, space: spaces.Space[Any], device: torch.device) -> None:
        """Create the scaling. Raises ValueError for a space that `check_bounded` refuses."""
        super().__init__()
        box = check_bounded(space)
        self.shape = box.shape
        self.actions = int(np.prod(box.shape))
        for name, bound in (("low", box.low), ("high", box.high)):
            self.register_buffer(name, torch.as_tensor(bound, dtype=torch.float32, device=device).flatten(), False)

    def to_action(self, x_NA: Tensor) -> Tensor:
        """Convert to an action in the units and shape of the space."""
        action = torch.lerp(self.low, self.high, (x_NA + 1.0) * 0.5)
        return action if len(self.shape) == 1 else action.unflatten(1, self.shape)

    def from_action(self, action: Tensor) -> Tensor:
        """Convert an action to its network form, in [-1, 1]."""
        return (action.flatten(1) - self.low) * (2.0 / (self.high - self.low)) - 1.0


class Layers(NamedTuple):
    """Hidden layers of a network: their units, their activation, and the source of the initial parameters."""

    hidden: Sequence[int]
    activation: str
    generator: torch.Generator
    stack: type[Stack] = Stack


class _Network(nn.Module):
    """Base class of networks with an encoder and hidden layers, K times. `more` inputs follow the encoded features."""

    def __init__(
        self, features: int, layers: Layers, encoder: nn.Module | None = None, *, members: int = 1, more: int = 0
    ) -> None:
        super().__init__()
        self.encoder = encoder
        self.hidden = layers.stack(members, features_of(encoder, features) + more, *layers[:3])


class Actor(_Network):
    """Network from an observation to an action, or to mean and log standard deviation of a squashed Gaussian."""

    def __init__(
        self, features: int, actions: int, layers: Layers, encoder: nn.Module | None = None, *, stochastic: bool
    ) -> None:
        super().__init__(features, layers, encoder)
        self.stochastic = stochastic
        self.head = orthogonal_linear(self.hidden.features, actions * (1 + stochastic), 0.01, layers.generator)
        bound = torch.ones(actions, dtype=torch.float32, device=layers.generator.device)
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


class _CriticEnsemble(_Network):
    """Base class of K independent critics with an encoder in common, evaluated together.

    `privileged` is the number of features C of a critic observation, which the critics receive in addition. Parameters
    are drawn for one critic after the other, so no two critics are equal.
    """

    reads_action: ClassVar[bool]  # whether the action is an input; otherwise, each critic returns the values of all

    def __init__(
        self,
        members: int,
        features: int,
        actions: int,
        layers: Layers,
        encoder: nn.Module | None = None,
        *,
        privileged: int = 0,
        outputs: int = 1,
    ) -> None:
        more = privileged + actions if self.reads_action else privileged
        super().__init__(features, layers, encoder, members=members, more=more)
        self.members = members
        outputs = outputs if self.reads_action else actions
        heads = [orthogonal_linear(self.hidden.features, outputs, 1.0, layers.generator) for _ in range(members)]
        weights, biases = ([getattr(head, name).detach() for head in heads] for name in ("weight", "bias"))
        if not self.reads_action:  # (K, H, A) and (K, 1, A) instead of (K, 1, H) and (K, 1)
            weights = [weight.t() for weight in weights]
            biases = [bias.unsqueeze(0) for bias in biases]
        self.weight = nn.Parameter(torch.stack(weights))
        self.bias = nn.Parameter(torch.stack(biases))


class Critics(_CriticEnsemble):
    """K independent critics of an observation and an action, evaluated together.

    All critics share the encoder, which does not depend on the action. With several `outputs`, such as quantiles of the
    value, results have the shape (K, B, outputs).
    """

    reads_action = True

    def forward(self, x: Features, action_BA: Tensor) -> Tensor:
        """Return the values (K, B)."""
        h_KBH = self.hidden(torch.cat((critic_features(self.encoder, x), action_BA), 1))
        return torch.baddbmm(self.bias.unsqueeze(1), h_KBH, self.weight.mT).squeeze(-1)

    def frozen(self, x: Features, action_BA: Tensor, members: int | None = None) -> Tensor:
        """Return the values of the first `members`, with gradients of the action only. Halves the backward pass."""
        parameters = (*self.hidden.layers, self.weight, self.bias)
        *layers, weight, bias = (parameter.detach()[:members] for parameter in parameters)
        with torch.no_grad():  # features of the encoder do not depend on the action
            features = critic_features(self.encoder, x)
        x_BI = torch.cat((features, action_BA), 1)
        # without hidden layers, `through` would not know the number of members
        h_KBH = self.hidden.through(x_BI, layers) if layers else x_BI.expand(len(weight), *x_BI.shape)
        return torch.baddbmm(bias.unsqueeze(1), h_KBH, weight.mT).squeeze(-1)


class StateValue(_Network):
    """Value network: an observation -> V(s).

    `privileged` is the number of features of a critic observation, see `Critics`.
    """

    def __init__(self, features: int, layers: Layers, encoder: nn.Module | None = None, *, privileged: int = 0) -> None:
        super().__init__(features, layers, encoder, more=privileged)
        self.head = orthogonal_linear(self.hidden.features, 1, 1.0, layers.generator)

    def forward(self, x: Features) -> Tensor:
        """Return the values (B,)."""
        return self.head(self.hidden(critic_features(self.encoder, x))[0]).squeeze(-1)


class ActionValues(_CriticEnsemble):
    """K independent critics of all Discrete actions, evaluated together: (B, F) -> (K, B, A)."""

    reads_action = False

    def forward(self, x: Features) -> Tensor:
        """Return the values (K, B, A) of all actions, masked or not."""
        return torch.baddbmm(self.bias, self.hidden(critic_features(self.encoder, x)), self.weight)


class DiscreteActor(_Network):
    """Network from features (B, F) to a categorical distribution over actions."""

    def __init__(
        self, features: int, space: spaces.Space[Any], layers: Layers, encoder: nn.Module | None = None
    ) -> None:
        super().__init__(features, layers, encoder)
        self.head = DiscreteHead(self.hidden.features, space, 0.01, layers.generator)

    def forward(self, x: Features) -> Distribution:
        """Return the distribution over valid actions. A row without a valid action counts as unmasked."""
        x_BF, mask_BA, _ = inputs_of(x)
        mask_BA = None if mask_BA is None else nonempty_mask(mask_BA)
        return self.head(self.hidden(through(self.encoder, x_BF))[0], mask_BA)


class OffPolicyNetworks(nn.Module, abc.ABC):
    """Base class: a preprocessor, an actor, and, unless K = 0, K critics and usually target copies of the critics."""

    masks: ClassVar[bool] = False  # whether the actor reads action masks

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
        tree: bool = False,
        outputs: int = 1,
        critic_stack: type[Stack] = Stack,
        targets: bool = True,
    ) -> None:
        """Create the networks. Actor and critics have separate encoders, from `encoder_for`.

        `actor` and `critic` replace all layers, see `rein.networks.custom_networks`. With one of them, or with `tree`,
        preprocessed observations are not flattened. `outputs` is the number of outputs of `Critics`, and `critic_stack`
        the class of their hidden layers. Without `targets`, there are no target critics.

        Raises ValueError for images without an encoder, and for actions that are not supported.
        """
        super().__init__()
        self._read_actions(action_space, generator.device)
        self._outputs = outputs
        custom: Any = None
        if tree or actor is not None or critic is not None:
            from rein.networks import custom_networks as custom  # most runs do not need it
        self.preprocess: Preprocessor = (Preprocessor if custom is None else custom.TreePreprocessor)(
            observation_space,
            generator.device,
            normalize=normalize_observation,
            scale_images=scale_images,
            custom_encoder=encoder is not None,
            masks=self.masks,
            critic=critics > 0,
        )
        if self.preprocess.images and encoder is None and (actor is None or critic is None):
            raise ValueError(
                f"{observation_space} contains images, but this agent learns from vectors: pass an encoder"
            )

        def new_encoder() -> nn.Module | None:
            arguments = observation_space, generator, encoder
            return encoder_for(*arguments) if custom is None else custom.FlattenedEncoder(*arguments, scale_images)

        layers = Layers(tuple(hidden), activation, generator)
        modules = custom and custom.CustomModules(observation_space, action_space, generator, self.preprocess)
        if actor is None:
            self.actor: Any = self._actor(layers, new_encoder())
        else:
            self.actor = self._custom_actor(modules, actor, generator)
        if not critics:
            return
        if critic is None:
            self.critics: Any = self._critics(critics, layers._replace(stack=critic_stack), new_encoder())
        else:
            self.critics = self._custom_critics(modules, critic, critics)
        if targets:
            self.target_critics = copy.deepcopy(self.critics).requires_grad_(False)

    @abc.abstractmethod
    def _read_actions(self, action_space: spaces.Space[Any], device: torch.device) -> None:
        """Assign what the other methods need to know of the actions."""

    @abc.abstractmethod
    def _actor(self, layers: Layers, encoder: nn.Module | None) -> nn.Module: ...

    @abc.abstractmethod
    def _custom_actor(self, modules: Any, factory: NetworkFactory, generator: torch.Generator) -> nn.Module: ...

    @abc.abstractmethod
    def _critics(self, members: int, layers: Layers, encoder: nn.Module | None) -> nn.Module: ...

    @abc.abstractmethod
    def _custom_critics(self, modules: Any, factory: NetworkFactory, members: int) -> nn.Module: ...


class ContinuousNetworks(OffPolicyNetworks):
    """Networks of an agent with continuous actions. The actor is stochastic."""

    stochastic: ClassVar[bool] = True

    def _read_actions(self, action_space: spaces.Space[Any], device: torch.device) -> None:
        self.scale = Scale(action_space, device)

    def _actor(self, layers: Layers, encoder: nn.Module | None) -> nn.Module:
        return Actor(self.preprocess.features, self.scale.actions, layers, encoder, stochastic=self.stochastic)

    def _custom_actor(self, modules: Any, factory: NetworkFactory, generator: torch.Generator) -> nn.Module:
        what = "means and log standard deviations" if self.stochastic else "actions before tanh"
        network = modules.build("actor", factory, {what: (2, self.scale.actions * (1 + self.stochastic))})
        return CustomActor(network, self.scale.actions, generator.device)

    def _critics(self, members: int, layers: Layers, encoder: nn.Module | None) -> nn.Module:
        size = self.preprocess.features, self.scale.actions
        return Critics(members, *size, layers, encoder, privileged=self.preprocess.privileged, outputs=self._outputs)

    def _custom_critics(self, modules: Any, factory: NetworkFactory, members: int) -> nn.Module:
        from rein.networks.custom_networks import CustomCritics

        return CustomCritics(modules, factory, members, self.scale.actions, self._outputs)

    def act(self, observation: Tree, generator: torch.Generator | None) -> Tensor:
        """Return actions `(N, *A)` of a stochastic actor: samples, or modes without a generator."""
        distribution = self.actor.distribution(self.preprocess(observation))
        sample = distribution.mode() if generator is None else distribution.sample(generator)
        return self.scale.to_action(sample.tanh())


class DeterministicNetworks(ContinuousNetworks):
    """Networks with a deterministic actor and a target copy of it."""

    stochastic = False

    def __init__(self, *spaces_and_generator: Any, **shape: Any) -> None:
        """See `OffPolicyNetworks`, which takes the same arguments."""
        super().__init__(*spaces_and_generator, **shape)
        self.target_actor = copy.deepcopy(self.actor).requires_grad_(False)


class DiscreteNetworks(OffPolicyNetworks):
    """Networks of an agent with Discrete actions."""

    masks = True
    carry_size = 0

    def _read_actions(self, action_space: spaces.Space[Any], device: torch.device) -> None:
        self._actions = count_actions(action_space)
        self._space = action_space

    def _actor(self, layers: Layers, encoder: nn.Module | None) -> nn.Module:
        return DiscreteActor(self.preprocess.features, self._space, layers, encoder)

    def _custom_actor(self, modules: Any, factory: NetworkFactory, generator: torch.Generator) -> nn.Module:
        from rein.networks.custom_networks import CustomDiscreteActor

        return CustomDiscreteActor(modules, factory, self._space, generator)

    def _critics(self, members: int, layers: Layers, encoder: nn.Module | None) -> nn.Module:
        size = self.preprocess.features, self._actions
        return ActionValues(members, *size, layers, encoder, privileged=self.preprocess.privileged)

    def _custom_critics(self, modules: Any, factory: NetworkFactory, members: int) -> nn.Module:
        from rein.networks.custom_networks import CustomActionValues

        return CustomActionValues(modules, factory, members, self._actions)

    @property
    def policy_head(self) -> DiscreteHead:
        """Head that converts samples to actions."""
        return self.actor.head

    def policy(self, x: Features, carry: Tensor | None = None) -> tuple[Distribution, Tensor | None]:
        """Return the distribution over actions, and the carry unchanged."""
        return self.actor(x), carry
