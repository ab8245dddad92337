"""Networks of action values.

Shapes: B rows, H features, A actions.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor, nn

from rein.networks.encoder import Encoder, StemFactory, features_of, stem_for, through
from rein.networks.mlp import ACTIVATIONS, Stack, orthogonal_linear


class DuelingHead(nn.Module):
    """(B, H) -> Q (B, A).

        Q(s, a) = V(s) + A(s, a) - mean_a' A(s, a')

    V, the first output of one linear layer, is the mean of the Q of all actions. Weights are orthogonal with gain 1,
    biases zero, drawn under `generator`.

    Source: Wang et al. 2016, equation 9.
    """

    def __init__(self, features: int, actions: int, generator: torch.Generator) -> None:
        super().__init__()
        self.linear = orthogonal_linear(features, 1 + actions, 1.0, generator)

    def forward(self, features_BH: Tensor) -> Tensor:
        """(B, A)."""
        both = self.linear(features_BH)
        value_B1, advantage_BA = both[..., :1], both[..., 1:]
        return advantage_BA + (value_B1 - advantage_BA.mean(-1, keepdim=True))


class QNetwork(nn.Module):
    """What an agent learns that chooses by values: an observation -> Q(s, a) of every action.

    An encoder (flat numbers or an image), for images a convolutional stem, hidden layers and a linear or dueling head.
    A hidden layer is linear, then, with `layer_norm`, normalized over its features (Ba et al. 2016) and scaled by what
    is learned, then goes through the activation: with that norm, temporal differences need neither a target network nor
    replay to stay bounded (Gallici et al. 2024). The stem has none.

    Weights are orthogonal, of gain sqrt(2) and in the head 1, biases zero, drawn under `generator`, on its device.
    Raises ValueError for actions that are not Discrete.
    """

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        generator: torch.Generator,
        *,
        hidden: Sequence[int] = (128, 128),
        activation: str = "relu",
        layer_norm: bool = True,
        dueling: bool = False,
        stem: StemFactory | None = None,
        normalize_observation: bool = False,
        scale_images: bool = True,
    ) -> None:
        """`dueling` is that of `rein.networks.q_network`, `stem` that of `stem_for`.

        Without `layer_norm` hidden layers are not normalized.
        """
        super().__init__()
        if not isinstance(action_space, spaces.Discrete):
            raise ValueError(f"the action space is {action_space}; values are learned of Discrete actions")
        scaling = {"scale_images": scale_images, "own_stem": stem is not None}
        self.encoder = Encoder(observation_space, generator.device, normalize=normalize_observation, **scaling)
        self.stem = stem_for(observation_space, generator, stem)
        sizes = [features_of(self.stem, self.encoder.features), *hidden]
        if layer_norm:
            self.hidden: nn.Module = _normalized(sizes, activation, generator)
        else:
            self.hidden = Stack(1, sizes[0], hidden, activation, generator)
        actions = int(action_space.n)
        head = DuelingHead(sizes[-1], actions, generator) if dueling else None
        self.head = head or orthogonal_linear(sizes[-1], actions, 1.0, generator)

    def forward(self, x_BF: Tensor) -> Tensor:
        """(B, A), of what the encoder made of observations."""
        hidden = self.hidden(through(self.stem, x_BF))
        return self.head(hidden[0] if isinstance(self.hidden, Stack) else hidden)


def _normalized(sizes: Sequence[int], activation: str, generator: torch.Generator) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(sizes):
        layers.append(orthogonal_linear(inputs, outputs, math.sqrt(2.0), generator))
        layers += [nn.LayerNorm(outputs, dtype=torch.float32, device=generator.device), ACTIVATIONS[activation]()]
    return nn.Sequential(*layers)
