"""What a state is worth, whatever is done in it.

Shapes: B rows, F features of an observation.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from rein.networks.mlp import orthogonal_linear
from rein.networks.own_stem import features_of, through
from rein.networks.stack import Stack


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
