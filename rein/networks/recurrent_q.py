"""The value of every action, from all observations of an episode so far.

Shapes: T steps in time, N environments, B sequences, F features of an observation, C numbers of a carry, A actions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor, nn

from rein.networks.actor_critic import CoreFactory
from rein.networks.encoder import Encoder, StemFactory, features_of, stem_for, through
from rein.networks.mlp import Stack, orthogonal_linear
from rein.networks.q_network import DuelingHead


class RecurrentQNetwork(nn.Module):
    """An encoder (flat numbers or an image), for images a convolutional stem, hidden layers, a core and a head.

    All that it remembers of an environment is one row of numbers, its carry; zeros are the beginning of an episode.
    Weights are orthogonal, biases zero but for those of cores, drawn under `generator`, on its device.

    Raises ValueError for actions that are not Discrete.
    """

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        generator: torch.Generator,
        *,
        core: CoreFactory,
        stem: StemFactory | None = None,
        hidden: Sequence[int] = (64,),
        activation: str = "relu",
        dueling: bool = False,
        normalize_observation: bool = False,
        scale_images: bool = True,
    ) -> None:
        """`core` makes one of `rein.networks.recurrent`; `dueling` is that of `rein.networks.q_network`.

        `stem` makes one of the user's own, see `stem_for`.
        """
        super().__init__()
        if not isinstance(action_space, spaces.Discrete):
            raise ValueError(f"the action space is {action_space}; values are learned of Discrete actions")
        scaling = {"scale_images": scale_images, "own_stem": stem is not None}
        self.encoder = Encoder(observation_space, generator.device, normalize=normalize_observation, **scaling)
        self.stem = stem_for(observation_space, generator, stem)
        inputs = features_of(self.stem, self.encoder.features)
        self.hidden = Stack(1, inputs, hidden, activation, generator)
        self.core = core(inputs=self.hidden.features, generator=generator)
        features, actions = self.core.features, int(action_space.n)
        head = DuelingHead(features, actions, generator) if dueling else None
        self.head = head or orthogonal_linear(features, actions, 1.0, generator)

    @property
    def carry_size(self) -> int:
        """C."""
        return self.core.carry_size

    def step(self, x_NF: Tensor, carry_NC: Tensor) -> tuple[Tensor, Tensor]:
        """The values (N, A), and the carry after this step."""
        y_NH, carry_NC = self.core.step(self._hidden(x_NF), carry_NC)
        return self.head(y_NH), carry_NC

    def sequence(self, x_TBF: Tensor, carry_BC: Tensor) -> Tensor:
        """The values (T, B, A) that `step` gives at each of T steps of one episode."""
        hidden_TBH = self._hidden(x_TBF.flatten(0, 1)).unflatten(0, x_TBF.shape[:2])
        never_TB = torch.zeros(x_TBF.shape[:2], dtype=torch.bool, device=x_TBF.device)
        return self.head(self.core.sequence(hidden_TBH, carry_BC, never_TB)[0])

    def warm_up(self, x_TBF: Tensor, carry_BC: Tensor, valid_TB: Tensor) -> Tensor:
        """The carry (B, C) after those steps that are valid, from this one on."""
        if not len(x_TBF):
            return carry_BC
        hidden_TBH = self._hidden(x_TBF.flatten(0, 1)).unflatten(0, x_TBF.shape[:2])
        for hidden_BH, valid_B1 in zip(hidden_TBH.unbind(), valid_TB.unsqueeze(-1).unbind(), strict=True):
            carry_BC = torch.where(valid_B1, self.core.step(hidden_BH, carry_BC)[1], carry_BC)
        return carry_BC

    def _hidden(self, x_BF: Tensor) -> Tensor:
        return self.hidden(through(self.stem, x_BF))[0]
