"""A policy and a value for every observation, with separate networks or one that both look through.

Shapes: T steps in time, N environments, B rows, F features of an observation, K networks, H hidden features, C numbers
of a carry.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor, nn

from rein.networks.encoder import Encoder, StemFactory, features_of, stem_for, through
from rein.networks.heads import action_head
from rein.networks.mlp import Stack, orthogonal_linear
from rein.networks.recurrent import Core
from rein.ops.distributions import Distribution

CoreFactory = Callable[..., Core]  # (inputs=, generator=) -> the core: functools.partial(LSTM, features=64)


class ActorCritic(nn.Module):
    """What a policy-gradient agent learns: an observation -> a distribution over actions and a value.

    An encoder (flat numbers or an image), for images a convolutional stem, hidden layers, perhaps a recurrent core, and
    two heads. Actor and critic have hidden layers and a core each, or share them; they always share the stem. All that
    a recurrent network remembers of an environment is one row of numbers, its carry; zeros are the beginning of an
    episode. Without a core the carry is None.
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
        stem: StemFactory | None = None,
        normalize_observation: bool = False,
        scale_images: bool = True,
        squash: bool | str = False,
        log_std: float = 0.0,
        state_dependent_std: bool = False,
    ) -> None:
        """`squash`, `log_std` and `state_dependent_std` are for continuous actions, see `action_head`.

        `stem` makes one of the user's own, see `stem_for`. Everything is drawn under `generator`, on its device.
        """
        super().__init__()
        scaling = {"scale_images": scale_images, "own_stem": stem is not None}
        self.encoder = Encoder(observation_space, generator.device, normalize=normalize_observation, **scaling)
        self.stem = stem_for(observation_space, generator, stem)
        inputs = features_of(self.stem, self.encoder.features)
        members = 1 if shared else 2
        self.hidden = Stack(members, inputs, hidden, activation, generator)
        self.cores = nn.ModuleList()
        if core is not None:
            self.cores.extend(core(inputs=self.hidden.features, generator=generator) for _ in range(members))
        features = self.cores[0].features if core is not None else self.hidden.features
        std = {"log_std": log_std, "state_dependent_std": state_dependent_std}
        self.policy_head = action_head(features, action_space, generator, squash=squash, **std)  # type: ignore[arg-type]  # a core's `features`, which nn.Module does not declare
        self.value_head = orthogonal_linear(features, 1, 1.0, generator)  # type: ignore[arg-type]  # as above

    @property
    def carry_size(self) -> int:
        """C; 0 without a core."""
        return sum(core.carry_size for core in self.cores)  # type: ignore[misc]  # a core's, which nn.Module does not declare

    def forward(self, x_BF: Tensor) -> tuple[Distribution, Tensor]:
        """Of networks without a core: the distribution over actions, and the value (B,)."""
        return self._heads(*self._hidden(x_BF).unbind(0))

    def step(self, x_NF: Tensor, carry_NC: Tensor | None = None) -> tuple[Distribution, Tensor, Tensor | None]:
        """The distribution, the value (N,), and the carry after this step."""
        if carry_NC is None:
            return *self(x_NF), None
        hidden_KNH = self._hidden(x_NF)
        stepped = [core.step(x, c) for core, x, c in self._with_carry(hidden_KNH, carry_NC)]  # type: ignore[operator]  # as above
        distribution, value_N = self._heads(*(y for y, _ in stepped))
        return distribution, value_N, torch.cat([c for _, c in stepped], 1)

    def sequence(self, x_TNF: Tensor, carry_NC: Tensor, reset_TN: Tensor) -> tuple[Distribution, Tensor]:
        """What `step` says at each of T steps, from this carry on, which is zeroed before a step that is a reset."""
        steps, num_envs = x_TNF.shape[:2]
        hidden_KTNH = self._hidden(x_TNF.flatten(0, 1)).unflatten(1, (steps, num_envs))
        seen = [core.sequence(x, c, reset_TN)[0] for core, x, c in self._with_carry(hidden_KTNH, carry_NC)]  # type: ignore[operator]  # as above
        return self._heads(*seen)

    def look(self, x: Tensor, carry_NC: Tensor | None, reset_TN: Tensor | None) -> tuple[Distribution, Tensor]:
        """Of rows (B, F), or of sequences (T, N, F) where a carry and resets are given."""
        return self(x) if carry_NC is None or reset_TN is None else self.sequence(x, carry_NC, reset_TN)

    def policy(self, x_NF: Tensor, carry_NC: Tensor | None = None) -> tuple[Distribution, Tensor | None]:
        """The distribution alone, and the carry after this step."""
        if carry_NC is None:
            return self.policy_head(self._member(0, x_NF)), None
        distribution, _, carry_NC = self.step(x_NF, carry_NC)
        return distribution, carry_NC

    def value(self, x_NF: Tensor, carry_NC: Tensor | None = None) -> Tensor:
        """The value (N,) alone."""
        if carry_NC is not None:
            return self.step(x_NF, carry_NC)[1]
        return self.value_head(self._member(self.hidden.members - 1, x_NF)).squeeze(-1)

    def _hidden(self, x_BF: Tensor) -> Tensor:
        return self.hidden(through(self.stem, x_BF))

    def _member(self, k: int, x_BF: Tensor) -> Tensor:
        return self.hidden.member(k, through(self.stem, x_BF))

    def _heads(self, actor: Tensor, critic: Tensor | None = None) -> tuple[Distribution, Tensor]:
        return self.policy_head(actor), self.value_head(actor if critic is None else critic).squeeze(-1)

    def _with_carry(self, x_K: Tensor, carry_NC: Tensor) -> zip[tuple[nn.Module, Tensor, Tensor]]:
        """Each core with its input and its part of the carry."""
        return zip(self.cores, x_K.unbind(0), carry_NC.chunk(len(self.cores), 1), strict=True)
