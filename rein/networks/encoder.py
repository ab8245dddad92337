"""From an observation to what networks take in, where no gradient is needed: flat, normalized numbers, or an image.

Shapes: N rows, F features.
"""

from __future__ import annotations

from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor, nn

from rein.networks.convolution import Convolution
from rein.networks.flatten import Flatten, Tree
from rein.networks.normalizers import ObservationNormalizer

SMALLEST_IMAGE = 36  # pixels a side, which the convolutions of `Convolution` need


class Encoder(nn.Module):
    """Observations of a space as (N, F) float32, normalized if asked for; images as they are.

    An image is a Box of three dimensions that is large enough for convolutions; smaller grids are flattened.

    The statistics of a normalizer change in `update` alone: an agent calls it between two rollouts, so that what it
    said of an observation when it acted is what it says when it learns. Policies share them and never change them.
    """

    def __init__(self, space: spaces.Space[Any], device: torch.device, *, normalize: bool = False) -> None:
        """Raises ValueError where an image is to be normalized."""
        super().__init__()
        self.image = Convolution.is_image(space) and min(_size(space.shape)) >= SMALLEST_IMAGE  # type: ignore[arg-type]  # an image has a shape
        if self.image and normalize:
            raise ValueError(f"normalize_observation=True: an image, as in {space}, is scaled to [0, 1] anyway")
        self._flatten = None if self.image else Flatten(space, device)
        self.features = 0 if self._flatten is None else self._flatten.features
        self.normalizer = ObservationNormalizer(self.features, device) if normalize else None

    @torch.no_grad()
    def forward(self, observation: Tree) -> Tensor:
        """(N, F)."""
        if self._flatten is None:
            return observation
        flat_NF = self._flatten(observation)
        return flat_NF if self.normalizer is None else self.normalizer(flat_NF)

    def update(self, observation: Tree, valid_N: Tensor | None = None) -> None:
        """Take these observations into the statistics, if there are any."""
        if self.normalizer is not None and self._flatten is not None:
            self.normalizer.update(self._flatten(observation), valid_N)


def _size(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Height and width of an image, as `Convolution` reads its shape."""
    return shape[:2] if shape[2] < shape[0] else shape[1:]
