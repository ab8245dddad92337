"""Actors and critics: `ActorCritic` for on-policy agents; actor, K critics and target critics for off-policy agents.

Shapes: T steps in time, N environments, B rows, F features of an observation, K networks, H hidden features, C numbers
of a carry, A dimensions of an action or Discrete actions.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from rein.networks.custom_networks import (
    CustomActionValues,
    CustomCritics,
    CustomDiscreteActor,
    CustomModules,
    NetworkFactory,
    TreePreprocessor,
    encoder_of,
)
from rein.networks.encoder import EncoderFactory, Preprocessor, Tree, encoder_for, features_of, through
from rein.networks.heads import DiscreteHead, action_head, check_bounded, count_actions
from rein.networks.mlp import Stack, orthogonal_linear
from rein.networks.recurrent import Core
from rein.networks.reserved import Features, Inputs, inputs_of
from rein.ops.distributions import Distribution, SquashedNormal
from rein.ops.trees import map_tree
from rein.ops.values import nonempty_mask

CoreFactory = Callable[..., Core]  # (inputs=, generator=) -> the core, for example functools.partial(LSTM, features=64)


class ActorCritic(nn.Module):
    """Distribution over actions and value of an observation, for on-policy agents.

    The network consists of an encoder, hidden layers, an optional recurrent core, and two heads. Actor and critic share
    the encoder. They share hidden layers and core only if `shared` is set. The memory of a recurrent network is the
    carry, one row of numbers for each environment; zeros begin an episode. Without a core, the carry is None.

    If observations have the entry `critic_observation`, the input of the critic is the encoded observation followed by
    the critic observation. A recurrent critic then computes the value V(h, s) of a history and a state (Baisero & Amato
    2022, "Unbiased asymmetric reinforcement learning under partial observability").
    """

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        generator: torch.Generator,
        *,
        hidden: Sequence[int] = (64, 64),
        activation: str = "tanh",
        shared: bool = False,
        core: CoreFactory | None = None,
        encoder: EncoderFactory | None = None,
        normalize_observation: bool = False,
        scale_images: bool = True,
        squash: bool | str = False,
        log_std: float = 0.0,
        state_dependent_std: bool = False,
    ) -> None:
        """Create the networks. Parameters are drawn from `generator`, on its device.

        See `action_head` for `squash`, `log_std` and `state_dependent_std`, and `encoder_for` for `encoder`. Raises
        ValueError for critic observations with `shared`.
        """
        super().__init__()
        scaling = {"scale_images": scale_images, "custom_encoder": encoder is not None}
        self.preprocess = Preprocessor(
            observation_space, generator.device, normalize=normalize_observation, masks=True, critic=True, **scaling
        )
        privileged = self.preprocess.privileged
        if privileged and shared:
            raise ValueError(
                f"shared=True: {observation_space} has the entry 'critic_observation', which only the critic may see: "
                "use shared=False, or remove the entry"
            )
        self.encoder = encoder_for(observation_space, generator, encoder)
        inputs = features_of(self.encoder, self.preprocess.features)
        members = 1 if shared or privileged else 2
        self.hidden = Stack(members, inputs, hidden, activation, generator)
        # hidden layers of a critic with separate inputs
        self.critic_hidden = Stack(1, inputs + privileged, hidden, activation, generator) if privileged else None
        self.cores = nn.ModuleList()
        sizes: list[Any] = [self.hidden.features] * members
        if self.critic_hidden is not None:
            sizes.append(self.critic_hidden.features)
        if core is not None:
            self.cores.extend(core(inputs=size, generator=generator) for size in sizes)
            sizes = [part.features for part in self.cores]
        std = {"log_std": log_std, "state_dependent_std": state_dependent_std}
        self.policy_head = action_head(sizes[0], action_space, generator, squash=squash, **std)  # type: ignore[arg-type]  # values of options
        self.value_head = orthogonal_linear(sizes[-1], 1, 1.0, generator)

    @property
    def carry_size(self) -> int:
        """Size C of the carry; 0 without a core."""
        return sum(core.carry_size for core in self.cores)  # type: ignore[misc]  # nn.Module does not declare the `carry_size` of a core

    def forward(self, x: Features) -> tuple[Distribution, Tensor]:
        """Return the distribution over actions and the value (B,). Only for networks without a core."""
        inputs = inputs_of(x)
        return self._heads(inputs, *self._hidden(inputs))

    def step(self, x: Features, carry_NC: Tensor | None = None) -> tuple[Distribution, Tensor, Tensor | None]:
        """Return the distribution, the value (N,), and the carry after this step."""
        if carry_NC is None:
            return *self(x), None
        inputs = inputs_of(x)
        stepped = [core.step(x, c) for core, x, c in self._with_carry(self._hidden(inputs), carry_NC)]  # type: ignore[operator]  # see above
        distribution, value_N = self._heads(inputs, *(y for y, _ in stepped))
        return distribution, value_N, torch.cat([c for _, c in stepped], 1)

    def sequence(self, x: Features, carry_NC: Tensor, reset_TN: Tensor) -> tuple[Distribution, Tensor]:
        """Return the results of `step` at each of T steps, starting with this carry. A reset zeroes the carry."""
        inputs = inputs_of(x)
        rows = map_tree(lambda part: part.flatten(0, 1), inputs)
        hidden_K = [hidden_BH.unflatten(0, reset_TN.shape) for hidden_BH in self._hidden(rows)]
        seen = [core.sequence(x, c, reset_TN)[0] for core, x, c in self._with_carry(hidden_K, carry_NC)]  # type: ignore[operator]  # see above
        return self._heads(inputs, *seen)

    def look(self, x: Features, carry_NC: Tensor | None, reset_TN: Tensor | None) -> tuple[Distribution, Tensor]:
        """Return the results for rows (B, F), or for sequences (T, N, F) if a carry and resets are given."""
        return self(x) if carry_NC is None or reset_TN is None else self.sequence(x, carry_NC, reset_TN)

    def policy(self, x: Features, carry_NC: Tensor | None = None) -> tuple[Distribution, Tensor | None]:
        """Return only the distribution, and the carry after this step. Critic observations are not needed.

        The critic's part of the carry is unchanged if the critic has separate inputs.
        """
        inputs = inputs_of(x)
        if carry_NC is None:
            return self.policy_head(self._actor(inputs), inputs.action_mask), None
        if self.critic_hidden is None:
            distribution, _, carry_NC = self.step(x, carry_NC)
            return distribution, carry_NC
        actor_NC, critic_NC = carry_NC.chunk(2, 1)
        y_NH, actor_NC = self.cores[0].step(self._actor(inputs), actor_NC)  # type: ignore[operator]  # see above
        return self.policy_head(y_NH, inputs.action_mask), torch.cat([actor_NC, critic_NC], 1)

    def value(self, x: Features, carry_NC: Tensor | None = None) -> Tensor:
        """Return only the value (N,)."""
        if carry_NC is not None:
            return self.step(x, carry_NC)[1]
        inputs = inputs_of(x)
        if self.critic_hidden is None:
            critic_BH = self.hidden.member(self.hidden.members - 1, through(self.encoder, inputs.features))
        else:
            critic_BH = self._critic(inputs, through(self.encoder, inputs.features))
        return self.value_head(critic_BH).squeeze(-1)

    def _hidden(self, inputs: Inputs) -> tuple[Tensor, ...]:
        """Return the features of actor and critic, (B, H) each, or only one tensor if they are shared."""
        encoded = through(self.encoder, inputs.features)
        features = self.hidden(encoded).unbind(0)
        return features if self.critic_hidden is None else (*features, self._critic(inputs, encoded))

    def _actor(self, inputs: Inputs) -> Tensor:
        return self.hidden.member(0, through(self.encoder, inputs.features))

    def _critic(self, inputs: Inputs, encoded: Tensor) -> Tensor:
        if inputs.critic is None:
            raise ValueError("the critic needs the entry 'critic_observation', which this observation lacks")
        return self.critic_hidden(torch.cat((encoded, inputs.critic), 1))[0]  # type: ignore[misc]  # not None

    def _heads(self, inputs: Inputs, actor: Tensor, critic: Tensor | None = None) -> tuple[Distribution, Tensor]:
        value = self.value_head(actor if critic is None else critic).squeeze(-1)
        return self.policy_head(actor, inputs.action_mask), value

    def _with_carry(self, x_K: Sequence[Tensor], carry_NC: Tensor) -> zip[tuple[nn.Module, Tensor, Tensor]]:
        """Return each core with its input and its part of the carry."""
        return zip(self.cores, x_K, carry_NC.chunk(len(self.cores), 1), strict=True)


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
        scaling = {"scale_images": scale_images, "custom_encoder": encoder is not None}
        kind = Preprocessor if actor is None and critic is None and not tree else TreePreprocessor
        self.preprocess = kind(
            observation_space, generator.device, normalize=normalize_observation, critic=True, **scaling
        )
        if self.preprocess.images and encoder is None and (actor is None or critic is None):
            raise ValueError(
                f"{observation_space} contains images, but this agent learns from vectors: pass an encoder"
            )
        actions = self.scale.actions
        shape = self.preprocess.features, actions, tuple(hidden), activation, generator
        observations = self.preprocess, observation_space, generator, encoder, scale_images
        modules = CustomModules(observation_space, action_space, generator, self.preprocess)
        if actor is None:
            self.actor: Actor = Actor(*shape, stochastic=stochastic, encoder=encoder_of(*observations))
        else:
            what = "means and log standard deviations" if stochastic else "actions before tanh"
            network = modules.build("actor", actor, {what: (2, actions * (1 + stochastic))})
            self.actor = CustomActor(network, actions, generator.device)
        if critic is None:
            extra = {"encoder": encoder_of(*observations), "privileged": self.preprocess.privileged}
            self.critics: Critics | CustomCritics = Critics(critics, *shape, **extra)
        else:
            self.critics = CustomCritics(modules, critic, critics, actions)
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
        how = {"scale_images": scale_images, "custom_encoder": encoder is not None, "masks": True, "critic": True}
        kind = Preprocessor if actor is None and critic is None else TreePreprocessor
        self.preprocess = kind(observation_space, generator.device, normalize=normalize_observation, **how)
        if self.preprocess.images and encoder is None and (actor is None or critic is None):
            raise ValueError(
                f"{observation_space} contains images, but this agent learns from vectors: pass an encoder"
            )
        features, shape = self.preprocess.features, (hidden, activation, generator)
        observations = self.preprocess, observation_space, generator, encoder, scale_images
        modules = CustomModules(observation_space, action_space, generator, self.preprocess)
        if actor is None:
            self.actor: Any = DiscreteActor(features, action_space, *shape, encoder=encoder_of(*observations))
        else:
            self.actor = CustomDiscreteActor(modules, actor, action_space, generator)
        if critic is None:
            extra = {"encoder": encoder_of(*observations), "privileged": self.preprocess.privileged}
            self.critics: Any = ActionValues(critics, features, actions, *shape, **extra)
        else:
            self.critics = CustomActionValues(modules, critic, critics, actions)
        self.target_critics = copy.deepcopy(self.critics).requires_grad_(False)

    @property
    def policy_head(self) -> DiscreteHead:
        """Head that converts samples to actions."""
        return self.actor.head

    def policy(self, x: Features, carry: Tensor | None = None) -> tuple[Distribution, Tensor | None]:
        """Return the distribution over actions, and the carry unchanged."""
        return self.actor(x), carry
