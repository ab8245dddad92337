"""The distribution of the return of every action, as its quantiles at any levels.

Shapes: B rows, F features of an observation, H features, Q levels, C cosines, A actions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor, nn

from rein.networks.encoder import Encoder, StemFactory, features_of, stem_for, through
from rein.networks.mlp import Stack, orthogonal_linear


class QuantileNetwork(nn.Module):
    """An implicit quantile network: an observation and a level tau -> Z_tau(s, a) of every action.

        Z_tau(s, .) = f(psi(s) * phi(tau))        phi(tau) = relu(W (cos(pi i tau))_i=0..C-1 + b)

    psi is an encoder (flat numbers or an image), for images a convolutional stem, and all hidden layers but the last
    one; f is the last hidden layer and a linear head; * is the product feature by feature.

    Q(s, a) = E Z_tau(s, a) is the mean over `action_quantiles` levels, evenly spaced in (0, risk): with a `risk` below
    1 of the lowest returns alone, their conditional value at risk.

    Weights are orthogonal, of gain sqrt(2) and in the head 1, biases zero, drawn under `generator`, on its device.
    Raises ValueError for actions that are not Discrete.

    Source: Dabney et al. 2018 (IQN), 3.1 and equation 4.
    """

    levels: Tensor
    _frequency: Tensor

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        generator: torch.Generator,
        *,
        hidden: Sequence[int] = (128, 128),
        activation: str = "relu",
        stem: StemFactory | None = None,
        cosines: int = 64,
        action_quantiles: int = 32,
        risk: float = 1.0,
        normalize_observation: bool = False,
        scale_images: bool = True,
    ) -> None:
        """`cosines` is C, `stem` that of `stem_for`."""
        super().__init__()
        if not isinstance(action_space, spaces.Discrete):
            raise ValueError(f"the action space is {action_space}; values are learned of Discrete actions")
        device = generator.device
        scaling = {"scale_images": scale_images, "own_stem": stem is not None}
        self.encoder = Encoder(observation_space, device, normalize=normalize_observation, **scaling)
        self.stem = stem_for(observation_space, generator, stem)
        inputs = features_of(self.stem, self.encoder.features)
        self.before = Stack(1, inputs, hidden[:-1], activation, generator)
        self.embedding = orthogonal_linear(cosines, self.before.features, math.sqrt(2.0), generator)
        self.after = Stack(1, self.before.features, hidden[-1:], activation, generator)
        self.head = orthogonal_linear(self.after.features, int(action_space.n), 1.0, generator)
        frequency_C = torch.arange(cosines, dtype=torch.float32, device=device) * math.pi
        self.register_buffer("_frequency", frequency_C, persistent=False)
        self.register_buffer("levels", even_levels(action_quantiles, device) * risk, persistent=False)

    def forward(self, x_BF: Tensor) -> Tensor:
        """Q (B, A), of what the encoder made of observations."""
        return self.quantiles(x_BF, self.levels.expand(len(x_BF), -1)).mean(1)

    def quantiles(self, x_BF: Tensor, level_BQ: Tensor) -> Tensor:
        """Z (B, Q, A) at levels in (0, 1)."""
        psi_BH = self.before(through(self.stem, x_BF))[0]
        phi_BQH = self.embedding((level_BQ.unsqueeze(-1) * self._frequency).cos()).relu()
        both = (psi_BH.unsqueeze(1) * phi_BQH).flatten(0, 1)
        return self.head(self.after(both)[0]).unflatten(0, level_BQ.shape)


def even_levels(count: int, device: torch.device | str = "cpu") -> Tensor:
    """(Q,), the middles of as many equal parts of (0, 1): the levels of QR-DQN (Dabney et al. 2018), lemma 2."""
    return (torch.arange(count, dtype=torch.float32, device=device) + 0.5) / count
