"""Stacks of networks whose hidden layers are normalized.

Shapes: K networks, B rows, I inputs, F features.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rein.networks.mlp import Stack
from rein.ops.normalization import batch_renorm


class _NormalizedStack(Stack):
    """Base class: `layers` ends with scales and shifts (K, 1, F) of the normalized features in turn."""

    def _normalize(self, sizes: Sequence[int], device: torch.device) -> None:
        """Add the scales and shifts of features of these sizes."""
        like: dict[str, Any] = {"dtype": torch.float32, "device": device}
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(self.members, 1, size, **like)) for size in sizes)
        self.shifts = nn.ParameterList(nn.Parameter(torch.zeros(self.members, 1, size, **like)) for size in sizes)
        self.layers += [p for pair in zip(self.scales, self.shifts, strict=True) for p in pair]

    def _pairs(self, layers: Sequence[Tensor]) -> tuple[list[tuple[Tensor, Tensor]], list[tuple[Tensor, Tensor]]]:
        """Return the weights with biases, and the scales with shifts."""
        pairs = list(zip(layers[::2], layers[1::2], strict=True))
        return pairs[: len(self.weights)], pairs[len(self.weights) :]


class LayerNormStack(_NormalizedStack):
    """`Stack` with layer normalization before each activation: act(layer_norm(x W + b)).

    Source: Ba et al. 2016; Ball et al. 2023 (RLPD) for critics.
    """

    def __init__(
        self, members: int, inputs: int, hidden: Sequence[int], activation: str, generator: torch.Generator
    ) -> None:
        super().__init__(members, inputs, hidden, activation, generator)
        self._normalize(hidden, generator.device)

    def through(self, x_BI: Tensor, layers: Sequence[Tensor]) -> Tensor:
        """Evaluate networks with these parameters: (K, B, H)."""
        x = x_BI.expand(len(layers[0]) if layers else self.members, *x_BI.shape[-2:])
        for (weight, bias), (scale, shift) in zip(*self._pairs(layers), strict=True):
            x = torch.baddbmm(bias, x, weight)
            x = self._apply_activation(torch.addcmul(shift, torch.layer_norm(x, x.shape[-1:]), scale))
        return x


class BatchRenormStack(_NormalizedStack):
    """`Stack` with batch renormalization of the inputs and after each activation.

    In training mode, features are normalized by `rein.ops.normalization.batch_renorm`, and the running statistics
    follow those of the batch. The first `WARM_UP` batches are normalized as in batch normalization, because the running
    statistics are not reliable yet. In evaluation mode, features are normalized by the running statistics.

    Source: Bhatt et al. 2024 (CrossQ), whose constants these are.
    """

    WARM_UP = 100_000
    R_MAX, D_MAX = 3.0, 5.0
    RATE, EPSILON = 0.01, 1e-3  # of the running statistics; added to variances

    batches: Tensor

    def __init__(
        self, members: int, inputs: int, hidden: Sequence[int], activation: str, generator: torch.Generator
    ) -> None:
        super().__init__(members, inputs, hidden, activation, generator)
        self._normalize([inputs, *hidden], generator.device)
        for place, scale in enumerate(self.scales):
            self.register_buffer(f"mean_{place}", torch.zeros_like(scale).detach())
            self.register_buffer(f"variance_{place}", torch.ones_like(scale).detach())
        self.register_buffer("batches", torch.zeros((), dtype=torch.int64, device=generator.device))

    def through(self, x_BI: Tensor, layers: Sequence[Tensor]) -> Tensor:
        """Evaluate all networks with these parameters: (K, B, H)."""
        linear, affine = self._pairs(layers)
        x = self._normalized(0, x_BI.expand(self.members, *x_BI.shape[-2:]), *affine[0])
        for place, ((weight, bias), after) in enumerate(zip(linear, affine[1:], strict=True), 1):
            x = self._normalized(place, self._apply_activation(torch.baddbmm(bias, x, weight)), *after)
        if self.training:
            self.batches += 1
        return x

    def _normalized(self, place: int, x_KBF: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        mean, variance = (self.get_buffer(f"{name}_{place}") for name in ("mean", "variance"))
        if not self.training:
            return torch.addcmul(shift, x_KBF - mean, scale * (variance + self.EPSILON).rsqrt())
        warm = self.batches >= self.WARM_UP
        limits = {"r_max": torch.where(warm, self.R_MAX, 1.0), "d_max": torch.where(warm, self.D_MAX, 0.0)}
        result = batch_renorm(x_KBF, mean, variance, **limits, epsilon=self.EPSILON)
        mean.lerp_(result.mean, self.RATE)
        variance.lerp_(result.variance, self.RATE)
        return torch.addcmul(shift, result.output, scale)
