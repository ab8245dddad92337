"""Actor-critic of on-policy agents.

Shapes: T steps in time, N environments, B rows, F features of an observation, H hidden features, C numbers of a carry.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor, nn

from rein.networks.encoder import (
    EncoderFactory,
    Features,
    Inputs,
    Preprocessor,
    encoder_for,
    features_of,
    inputs_of,
    through,
)
from rein.networks.heads import action_head
from rein.networks.mlp import Stack, orthogonal_linear
from rein.ops.distributions import Distribution
from rein.ops.trees import map_tree

CoreFactory = Callable[..., Any]  # (inputs=, generator=) -> the core, for example functools.partial(LSTM, features=64)


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

    def distribution_and_value(
        self, x: Features, carry_NC: Tensor | None, reset_TN: Tensor | None
    ) -> tuple[Distribution, Tensor]:
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
