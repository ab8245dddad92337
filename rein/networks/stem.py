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

SMALLEST_IMAGE = 36  # pixels a side; what is smaller is taken for a grid, each of whose numbers has its own meaning
_FEATURES = 512  # of an image


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
    return torch.as_tensor(np.flatnonzero(other), device=device)


class MixedStem(nn.Module):
    """Of flat observations (..., F), as `Flatten` makes them, (..., G): the other numbers, and 512 of each image.

    Each image has a `Convolution` of its own, in the order of the space. Bytes are divided by 255 for it; the other
    numbers stay what they are.
    """

    def __init__(self, space: spaces.Space[Any], features: int, generator: torch.Generator) -> None:
        super().__init__()
        self.images = nn.ModuleList()
        self._widths: list[int] = []
        self._places: list[tuple[bool, tuple[int, ...], float]] = []  # whether an image, its shape, what divides it
        others = 0
        for _, part in tensors_of(space):
            width, image = int(spaces.flatdim(part)), is_image(part)
            self._widths.append(width)
            self._places.append((image, part.shape or (), 255.0 if part.dtype == np.uint8 else 1.0))
            if image:
                self.images.append(Convolution(part, features, generator))
            others += 0 if image else width
        self.features = others + features * len(self.images)

    def forward(self, x: Tensor) -> Tensor:
        """(..., G)."""
        images, found = iter(self.images), []
        for part, (image, shape, scale) in zip(x.split(self._widths, -1), self._places, strict=True):
            found.append(next(images)(part.unflatten(-1, shape) / scale) if image else part)
        return torch.cat(found, -1)
