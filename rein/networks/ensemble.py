"""Several networks of the same shape, evaluated as one.

Shapes: K members, B rows, I inputs of a layer, O outputs of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from rein.networks.mlp import ACTIVATIONS, MLP, orthogonal_linear


class Ensemble(nn.Module):
    """K independent MLPs, each with a linear layer at its end: (B, I), or rows of their own (K, B, I) -> (K, B, O).

    A layer of all members is one batched product, which spares what K small operations cost besides arithmetic. Members
    are drawn under `generator` one after the other, each as `MLP` and then `orthogonal_linear` of that gain would be.
    Weights are (K, O, I), biases (K, O, 1). Raises ValueError for less than one member or an unknown activation.
    """

    def __init__(
        self,
        members: int,
        inputs: int,
        hidden: Sequence[int],
        outputs: int,
        activation: str,
        generator: torch.Generator,
        *,
        gain: float = 1.0,
    ) -> None:
        """`gain` is that of the last layer."""
        super().__init__()
        if members < 1:
            raise ValueError(f"Ensemble(members={members}): give 1 or more")
        drawn: list[list[nn.Linear]] = []
        for _ in range(members):
            body = MLP(inputs, hidden, activation, generator)
            linear = [layer for layer in body.layers if isinstance(layer, nn.Linear)]
            drawn.append([*linear, orthogonal_linear(body.features, outputs, gain, generator)])
        first, *rest = (_Linears(layer) for layer in zip(*drawn, strict=True))
        layers: list[nn.Module] = [first]
        for linears in rest:
            layers += [ACTIVATIONS[activation](), linears]
        self.layers = nn.Sequential(*layers)
        self.members = members

    def forward(self, x: Tensor) -> Tensor:
        """(K, B, O); every member sees the same rows where they have two dimensions."""
        x_KBI = x.expand(self.members, -1, -1) if x.ndim == 2 else x
        # rows are columns in between: a product with one output is then several times as fast as the other way round
        return self.layers(x_KBI.mT).mT


class _Linears(nn.Module):
    """Several linear layers as one: (K, I, B) -> (K, O, B)."""

    def __init__(self, layers: Iterable[nn.Linear]) -> None:
        super().__init__()
        weights, biases = zip(*((layer.weight.detach(), layer.bias.detach()) for layer in layers), strict=True)
        self.weight = nn.Parameter(torch.stack(weights))
        self.bias = nn.Parameter(torch.stack(biases).unsqueeze(-1))

    def forward(self, x_KIB: Tensor) -> Tensor:
        return torch.baddbmm(self.bias, self.weight, x_KIB)
