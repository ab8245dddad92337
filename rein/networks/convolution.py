"""The stem that looks at images.

Shapes: B images, H height, W width, C channels or stacked frames, F features; "..." for any leading dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor, nn

from rein.networks.mlp import orthogonal_linear


class Convolution(nn.Module):
    """Three convolutions and a linear layer, ReLU after each: (..., H, W, C) or (..., C, H, W) -> (..., F).

    Channels are the smaller one of the space's first and last dimension, and the first where both are equal: frames of
    (84, 84, 3) and stacks of (4, 84, 84) are what they look like. Bytes are divided by 255 here, on the device, so that
    images are kept and sent as bytes; floats are taken as they are, and best lie in [0, 1].

    An image that strides do not divide gets zeros around it, so that every pixel is seen: plain convolutions would
    leave out its last rows and columns (of 42 x 42 the last six, in which Pong has the player's own paddle).

    Weights are orthogonal with gain sqrt(2), biases zero, drawn under `generator`. Raises ValueError for a space that
    is no image, or too small for `layers`.

    Source: Mnih et al. 2015, "Model architecture" in the methods, which ends in 512 features.
    """

    def __init__(
        self,
        space: spaces.Space[Any],
        features: int,
        generator: torch.Generator,
        *,
        layers: Sequence[tuple[int, int, int]] = ((32, 8, 4), (64, 4, 2), (64, 3, 1)),
    ) -> None:
        """`layers` are the convolutions, each (features, kernel, stride)."""
        super().__init__()
        self._shape, self._channels_last = _image_shape(space)
        *size, channels = self._shape if self._channels_last else (*self._shape[1:], self._shape[0])
        padded = [_padded(length, layers, size) for length in size]
        margins = [(to - length) // 2 for to, length in zip(padded, size, strict=True)]
        rest = [to - length - margin for to, length, margin in zip(padded, size, margins, strict=True)]
        self._padding = (margins[1], rest[1], margins[0], rest[0])  # left, right, top, bottom
        size = padded
        stack: list[nn.Module] = []
        for outputs, kernel, stride in layers:
            stack += [_orthogonal_convolution(channels, outputs, kernel, stride, generator), nn.ReLU()]
            channels, size = outputs, [(length - kernel) // stride + 1 for length in size]
        stack += [nn.Flatten(), orthogonal_linear(channels * math.prod(size), features, math.sqrt(2.0), generator)]
        self.layers = nn.Sequential(*stack, nn.ReLU())
        self.features = features

    @staticmethod
    def is_image(space: spaces.Space[Any]) -> bool:
        """Whether it is a Box of three dimensions; how large an image has to be, the layers say."""
        return isinstance(space, spaces.Box) and len(space.shape) == 3

    def forward(self, x: Tensor) -> Tensor:
        """(..., F). Raises ValueError for images of another shape than the space's."""
        if x.shape[-3:] != self._shape:
            raise ValueError(f"images of (..., {', '.join(map(str, self._shape))}) are expected, not {tuple(x.shape)}")
        image_BCHW = x.reshape(-1, *self._shape)
        if self._channels_last:
            image_BCHW = image_BCHW.permute(0, 3, 1, 2)
        if any(self._padding):
            image_BCHW = nn.functional.pad(image_BCHW, self._padding)
        # channels lie next to each other, which convolutions on the CPU are up to 1.6 times as fast on
        image_BCHW = image_BCHW.to(torch.float32, memory_format=torch.channels_last)
        if x.dtype == torch.uint8:
            image_BCHW = image_BCHW / 255.0
        return self.layers(image_BCHW).reshape(*x.shape[:-3], self.features)


def _image_shape(space: spaces.Space[Any]) -> tuple[tuple[int, ...], bool]:
    """The shape of an image, and whether its channels come last."""
    if not Convolution.is_image(space) or space.shape is None:
        raise ValueError(
            f"an observation in {space} is no image: a Box of (H, W, C) or (C, H, W) is; give an image its channels, "
            "stack frames of one channel, and use an MLP for the rest"
        )
    return space.shape, space.shape[2] < space.shape[0]


def _padded(length: int, layers: Sequence[tuple[int, int, int]], size: Sequence[int]) -> int:
    """The least length from `length` on of which the last kernel of every layer ends where its input does."""
    least, stride = 1, 1
    for layer in reversed(layers):
        if min(layer) < 1:
            raise ValueError(f"layers={layers}: each is (features, kernel, stride), all 1 or more")
        least, stride = (least - 1) * layer[2] + layer[1], stride * layer[2]
    if length < least:
        fits = ((32, min(3, *size), 1),)
        raise ValueError(
            f"images of {size[0]} x {size[1]} are too small for layers={layers}, which need {least} x {least} or "
            f"more; layers={fits} would work"
        )
    return least + -(-(length - least) // stride) * stride  # each further output takes one more stride


class _Convolution(nn.Conv2d):
    """Left as it was allocated: torch would draw from the global generator."""

    def reset_parameters(self) -> None:
        """Not here: see `_orthogonal_convolution`."""


def _orthogonal_convolution(
    inputs: int, outputs: int, kernel: int, stride: int, generator: torch.Generator
) -> nn.Conv2d:
    layer = _Convolution(inputs, outputs, kernel, stride, device=generator.device)
    nn.init.orthogonal_(layer.weight, math.sqrt(2.0), generator=generator)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer
