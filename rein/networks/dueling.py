"""The value of every action, as the value of the state and what each action adds to it.

Shapes: B rows, H features, A actions.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rein.networks.mlp import orthogonal_linear


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
