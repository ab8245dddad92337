"""Convolutional encoders for images, and for observations that contain images.

Shapes: B images, L stacked frames, H height, W width, C channels, F features, "..." any leading dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor, nn

from rein.networks.mlp import orthogonal_linear
from rein.spaces import ImageLayout, image_layout, is_image, tensors_of

Layers = Sequence[tuple[int, int, int]]  # each (features, kernel, stride)

LAYERS: Layers = ((32, 8, 4), (64, 4, 2), (64, 3, 1))  # Mnih et al. 2015, for 84 x 84 pixels
# half the kernels and strides: the same work for 42 x 42 pixels
SMALL_LAYERS: Layers = ((16, 4, 2), (32, 4, 2), (32, 3, 2))
FEATURES = 512  # of each image
SMALL = 64  # images with a shorter side of fewer pixels are small


class Convolution(nn.Module):
    """Three convolutions and a linear layer, each followed by ReLU: (..., H, W, C) or (..., C, H, W) -> (..., F).

    Channels are the smaller one of the first and the last dimension; the first one if both are equal. Bytes can also
    have the shape (H, W) for one channel. Stacked frames have the shape (L, H, W, C) or (L, C, H, W), and their
    channels are concatenated. Bytes are divided by 255 on the device, so that images are stored and sent as bytes.
    Floats are used unchanged and should be in [0, 1].

    If the strides do not divide the image, it is padded with zeros, so that its last rows and columns are not ignored.
    An image whose shorter side has fewer than 64 pixels gets kernels and strides of half the size. Otherwise
    42 x 42 pixels would shrink to 2 x 2 places, too coarse to locate a ball.

    Weights are orthogonal with gain sqrt(2), biases are zero. They are drawn from `generator`. Raises ValueError if the
    space is not an image or is too small for `layers`.

    Source: Mnih et al. 2015, "Model architecture" in the methods, with 512 features. The small layers are rein's own.
    """

    def __init__(
        self,
        space: spaces.Space[Any],
        features: int,
        generator: torch.Generator,
        *,
        layers: Layers | None = None,
    ) -> None:
        """Create the layers. `layers` are the convolutions: by default `LAYERS`, or `SMALL_LAYERS` for small images."""
        super().__init__()
        self._image = _image(space)
        size, channels = self._image.size, self._image.frames * self._image.channels
        if layers is None:
            layers = SMALL_LAYERS if min(size) < SMALL else LAYERS
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

    def forward(self, x: Tensor) -> Tensor:
        """Return the features (..., F). Raises ValueError if the images do not have the shape of the space."""
        image = self._image
        leading = x.shape[: x.ndim - len(image.shape)]
        if (*leading, *image.shape) != x.shape:
            raise ValueError(
                f"expected images of shape (..., {', '.join(map(str, image.shape))}), got {tuple(x.shape)}"
            )
        image_BCHW = image.channels_first(x)
        if any(self._padding):
            image_BCHW = nn.functional.pad(image_BCHW, self._padding)
        return self.layers(_in_order(image_BCHW)).reshape(*leading, self.features)


def _in_order(image_BCHW: Tensor) -> Tensor:
    """Convert to float32 in channels-last order, which is faster on the CPU. Bytes are divided by 255.

    Reordering bytes plane by plane before the conversion takes half the time of torch's combined conversion.
    """
    if image_BCHW.dtype != torch.uint8:
        return image_BCHW.to(torch.float32, memory_format=torch.channels_last)
    if not image_BCHW.is_contiguous(memory_format=torch.channels_last):
        image_BCHW = torch.stack(image_BCHW.unbind(1), -1).movedim(-1, 1)
    return image_BCHW.float().div_(255.0)


def _image(space: spaces.Space[Any]) -> ImageLayout:
    image = image_layout(space)
    if image is None:
        raise ValueError(
            f"{space} is not an image: use a Box of shape (H, W, C) or (C, H, W), or of bytes of shape (H, W) or, for "
            "stacked frames, (L, H, W, C); use an MLP for other observations"
        )
    return image


def _padded(length: int, layers: Layers, size: Sequence[int]) -> int:
    """Return the smallest length >= `length` at which the last kernel of every layer ends at the end of its input."""
    least, stride = 1, 1
    for layer in reversed(layers):
        if min(layer) < 1:
            raise ValueError(f"layers={layers}: each layer must be (features, kernel, stride), all 1 or more")
        least, stride = (least - 1) * layer[2] + layer[1], stride * layer[2]
    if length < least:
        fits = ((32, min(3, *size), 1),)
        raise ValueError(
            f"images of {size[0]} x {size[1]} are too small for layers={layers}, which need {least} x {least} or "
            f"more; try layers={fits}"
        )
    return least + -(-(length - least) // stride) * stride  # each further output needs one more stride


class _Convolution(nn.Conv2d):
    """Layer without initial values: torch would draw them from the global generator."""

    def reset_parameters(self) -> None:
        """Do nothing; see `_orthogonal_convolution`."""


def _orthogonal_convolution(
    inputs: int, outputs: int, kernel: int, stride: int, generator: torch.Generator
) -> nn.Conv2d:
    layer = _Convolution(inputs, outputs, kernel, stride, dtype=torch.float32, device=generator.device)
    nn.init.orthogonal_(layer.weight, math.sqrt(2.0), generator=generator)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer


def image_encoder(space: spaces.Space[Any], generator: torch.Generator) -> Convolution | MixedEncoder:
    """Return the default encoder for observations that are or contain images."""
    return (Convolution if is_image(space) else MixedEncoder)(space, FEATURES, generator)


class MixedEncoder(nn.Module):
    """Encoder of flat observations (..., F) from `Flatten`: `features` of each image, and other numbers; (..., G).

    Each image has its own `Convolution`, in the order of the space. Bytes must already be divided by 255.
    """

    def __init__(self, space: spaces.Space[Any], features: int, generator: torch.Generator) -> None:
        super().__init__()
        self.images = nn.ModuleList()
        self._widths: list[int] = []
        self._places: list[tuple[bool, tuple[int, ...]]] = []  # whether it is an image, and its shape
        others = 0
        for _, part in tensors_of(space):
            width, image = int(spaces.flatdim(part)), is_image(part)
            self._widths.append(width)
            self._places.append((image, part.shape or ()))
            if image:
                self.images.append(Convolution(part, features, generator))
            others += 0 if image else width
        self.features = others + features * len(self.images)

    def forward(self, x: Tensor) -> Tensor:
        """Return the features (..., G)."""
        images, features = iter(self.images), []
        for part, (image, shape) in zip(x.split(self._widths, -1), self._places, strict=True):
            features.append(next(images)(part.unflatten(-1, shape)) if image else part)
        return torch.cat(features, -1)
