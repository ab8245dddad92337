"""What looks at observations with images in them, before the layers that see numbers only.

Shapes: F numbers of a flat observation, G features; "..." for any leading dimensions.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from rein.networks.convolution import Convolution
from rein.networks.flatten import tensors_of

SMALLEST_IMAGE = 36  # pixels a side; smaller images are flattened, because each number of a grid has its own meaning
_FEATURES = 512  # of an image


def scales(space: spaces.Space[Any]) -> bool:
    """Whether bytes of this space are divided by 255: those of images for convolutions and of small images."""
    return is_small_image(space) or (is_image(space) and space.dtype == np.uint8)


def is_small_image(space: spaces.Space[Any]) -> bool:
    """Whether it is a Box of bytes from 0 to 255 with 1, 3 or 4 channels, too small for convolutions."""
    if not isinstance(space, spaces.Box) or space.dtype != np.uint8 or len(space.shape) != 3 or is_image(space):
        return False
    channels = {space.shape[0], space.shape[-1]} & {1, 3, 4}
    return bool(channels) and bool((space.low == 0).all() and (space.high == 255).all())


def has_small_images(space: spaces.Space[Any]) -> bool:
    """Whether it is a small image, or a Dict or Tuple with one inside."""
    return any(is_small_image(part) for _, part in tensors_of(space))


def is_image(space: spaces.Space[Any]) -> bool:
    """Whether it is a Box that `Convolution` takes for an image, and not too small."""
    size = Convolution.size_of(space)
    return size is not None and min(size) >= SMALLEST_IMAGE


def has_images(space: spaces.Space[Any]) -> bool:
    """Whether it is an image, or a Dict or Tuple with one inside."""
    return any(is_image(part) for _, part in tensors_of(space))


def make_stem(space: spaces.Space[Any], generator: torch.Generator) -> Convolution | MixedStem | None:
    """What comes first in a network for observations of this space; None where they are vectors."""
    if is_image(space):
        return Convolution(space, _FEATURES, generator)
    return MixedStem(space, _FEATURES, generator) if has_images(space) else None


def other_columns(space: spaces.Space[Any], device: torch.device) -> Tensor:
    """Which of the F numbers belong to no image, int64."""
    parts = [part for _, part in tensors_of(space)]
    widths = [int(spaces.flatdim(part)) for part in parts]
    other = np.repeat([not is_image(part) for part in parts], widths)
    return torch.as_tensor(np.flatnonzero(other), dtype=torch.int64, device=device)


class MixedStem(nn.Module):
    """Of flat observations (..., F), as `Flatten` makes them, (..., G): the other numbers, and 512 of each image.

    Each image has a `Convolution` of its own, in the order of the space. Bytes have been divided by 255 before.
    """

    def __init__(self, space: spaces.Space[Any], features: int, generator: torch.Generator) -> None:
        super().__init__()
        self.images = nn.ModuleList()
        self._widths: list[int] = []
        self._places: list[tuple[bool, tuple[int, ...]]] = []  # whether an image, and its shape
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
        """(..., G)."""
        images, found = iter(self.images), []
        for part, (image, shape) in zip(x.split(self._widths, -1), self._places, strict=True):
            found.append(next(images)(part.unflatten(-1, shape)) if image else part)
        return torch.cat(found, -1)
