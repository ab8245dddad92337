"""The encoder that looks at images.

Shapes: B images, L stacked frames, H height, W width, C channels, F features; "..." for any leading dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from rein.networks.mlp import orthogonal_linear

Layers = Sequence[tuple[int, int, int]]  # each (features, kernel, stride)

LAYERS: Layers = ((32, 8, 4), (64, 4, 2), (64, 3, 1))  # of Mnih et al. 2015, for 84 x 84
SMALL_LAYERS: Layers = ((16, 4, 2), (32, 4, 2), (32, 3, 2))  # twice as fine, and for 42 x 42 no more work
SMALL = 64  # pixels of the shorter side, below which an image is small


class Convolution(nn.Module):
    """Three convolutions and a linear layer, ReLU after each: (..., H, W, C) or (..., C, H, W) -> (..., F).

    Channels are the smaller one of the image's first and last dimension, and the first where both are equal: frames of
    (84, 84, 3) and stacks of (4, 84, 84) are what they look like. Bytes may also be of (H, W), one channel, and of
    (L, H, W, C) or (L, C, H, W), stacked frames, whose channels are taken together. They are divided by 255 here, on
    the device, so that images are kept and sent as bytes; floats are taken as they are, and best lie in [0, 1].

    An image that strides do not divide gets zeros around it, so that every pixel is seen: plain convolutions would
    leave out its last rows and columns. One whose shorter side has fewer than 64 pixels is looked at with kernels and
    strides of half that size: of 42 x 42 the others would make 2 x 2 places, too coarse to find a ball in.

    Weights are orthogonal with gain sqrt(2), biases zero, drawn under `generator`. Raises ValueError for a space that
    is no image, or too small for `layers`.

    Source: Mnih et al. 2015, "Model architecture" in the methods, which ends in 512 features; small ones are ours.
    """

    def __init__(
        self,
        space: spaces.Space[Any],
        features: int,
        generator: torch.Generator,
        *,
        layers: Layers | None = None,
    ) -> None:
        """`layers` are the convolutions; None for `LAYERS`, or `SMALL_LAYERS` where the image is small."""
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

    @staticmethod
    def size_of(space: spaces.Space[Any]) -> tuple[int, int] | None:
        """Height and width where it is a space of images; how large they have to be, the layers say."""
        image = _looked_at(space)
        return None if image is None else image.size

    def forward(self, x: Tensor) -> Tensor:
        """(..., F). Raises ValueError for images of another shape than the space's."""
        image = self._image
        leading = x.shape[: x.ndim - len(image.shape)]
        if (*leading, *image.shape) != x.shape:
            raise ValueError(f"images of (..., {', '.join(map(str, image.shape))}) are expected, not {tuple(x.shape)}")
        image_BCHW = image.channels_first(x)
        if any(self._padding):
            image_BCHW = nn.functional.pad(image_BCHW, self._padding)
        return self.layers(_in_order(image_BCHW)).reshape(*leading, self.features)


class _Image(NamedTuple):
    """How the images of a space lie in memory."""

    shape: tuple[int, ...]
    frames: int
    channels_last: bool
    channels: int  # of a frame
    size: tuple[int, int]  # height and width

    def channels_first(self, x: Tensor) -> Tensor:
        """(..., *shape) -> (B, frames * channels, H, W)."""
        frame = (*self.size, self.channels) if self.channels_last else (self.channels, *self.size)
        image = x.reshape(-1, *(frame if self.frames == 1 else (self.frames, *frame)))
        if self.channels_last:
            image = image.movedim(-1, -3)
        return image if self.frames == 1 else image.flatten(1, 2)


def _in_order(image_BCHW: Tensor) -> Tensor:
    """As float32, bytes divided by 255, and with channels side by side: convolutions on the CPU are faster so.

    Bytes are put in order before they are widened, plane by plane, in half the time of torch's conversion of both.
    """
    if image_BCHW.dtype != torch.uint8:
        return image_BCHW.to(torch.float32, memory_format=torch.channels_last)
    if not image_BCHW.is_contiguous(memory_format=torch.channels_last):
        image_BCHW = torch.stack(image_BCHW.unbind(1), -1).movedim(-1, 1)
    return image_BCHW.float().div_(255.0)


def _looked_at(space: spaces.Space[Any]) -> _Image | None:
    if not isinstance(space, spaces.Box) or not (len(space.shape) == 3 or _may_be_images(space)):
        return None
    *frames, one, two, three = space.shape if len(space.shape) > 2 else (1, *space.shape)
    last = three < one
    height, width, channels = (one, two, three) if last else (two, three, one)
    return _Image(space.shape, frames[0] if frames else 1, last, channels, (height, width))


def _may_be_images(box: spaces.Box) -> bool:
    """Bytes of two or four dimensions; other numbers of as many may be anything."""
    return box.dtype == np.uint8 and len(box.shape) in (2, 4)


def _image(space: spaces.Space[Any]) -> _Image:
    image = _looked_at(space)
    if image is None:
        raise ValueError(
            f"an observation in {space} is no image: a Box of (H, W, C) or (C, H, W) is, and one of bytes of (H, W) or "
            "of stacked frames (L, H, W, C); use an MLP for the rest"
        )
    return image


def _padded(length: int, layers: Layers, size: Sequence[int]) -> int:
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
    layer = _Convolution(inputs, outputs, kernel, stride, dtype=torch.float32, device=generator.device)
    nn.init.orthogonal_(layer.weight, math.sqrt(2.0), generator=generator)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer
