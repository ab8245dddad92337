"""From an observation to what networks take in, where no gradient is needed: flat, normalized numbers, or an image.

Shapes: N rows, F features.
"""

from __future__ import annotations

from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor, nn

from rein.networks.flatten import Flatten, Tree
from rein.networks.normalizers import ObservationNormalizer
from rein.networks.stem import has_images, is_image, other_columns, scales


class Encoder(nn.Module):
    """Observations of a space as (N, F) float32, normalized if asked for; images as they are.

    Images are the boxes for which `rein.networks.stem.is_image` returns True; `images` tells whether there are any. An
    image alone is returned as it is, an image in a Dict or Tuple is flattened like all other parts.

    Bytes for which `rein.networks.stem.scales` returns True are divided by 255: here if they are flattened, otherwise
    by the convolutions. With `scale_images=False` they become floats from 0 to 255. A stem of the user's own
    (`own_stem`) gets them unscaled, and an image alone as bytes.

    The statistics of a normalizer change in `update` alone: an agent calls it between two rollouts, so that what it
    said of an observation when it acted is what it says when it learns. Policies share them and never change them.
    """

    def __init__(
        self,
        space: spaces.Space[Any],
        device: torch.device,
        *,
        normalize: bool = False,
        scale_images: bool = True,
        own_stem: bool = False,
    ) -> None:
        """Raises ValueError where nothing but images is to be normalized."""
        super().__init__()
        self.images = has_images(space)
        self._dimensions = len(space.shape or ()) + 1
        scaling = {"scales": scales} if scale_images and not own_stem else {}
        self._flatten = None if is_image(space) else Flatten(space, device, **scaling)
        self._as_floats = not (
            scale_images or own_stem
        )  # so that convolutions, which scale bytes, leave them as they are
        self.features = 0 if self._flatten is None else self._flatten.features
        self._others = other_columns(space, device) if self.images else None  # those beside images
        normalized = self.features if self._others is None else len(self._others)
        if normalize and not normalized:
            raise ValueError(
                f"normalize_observation=True: there is nothing beside images in {space}, and these are not normalized; "
                "without a stem of your own, bytes are scaled to [0, 1]"
            )
        self.normalizer = ObservationNormalizer(normalized, device) if normalize else None

    @torch.no_grad()
    def forward(self, observation: Tree) -> Tensor:
        """(N, F). Raises TypeError for an array that is no tensor, ValueError for one observation without its N."""
        if not issubclass(type(observation), (Tensor, dict)):
            raise TypeError(f"observations are tensors, not {type(observation).__name__}: use torch.as_tensor")
        if self._flatten is None:
            if observation.ndim < self._dimensions:
                raise ValueError(
                    f"images of N environments are expected, not one of {tuple(observation.shape)}; "
                    "for one environment, its observation with a first dimension of 1"
                )
            return observation.float() if self._as_floats else observation
        flat_NF = self._flatten(observation)
        if self.normalizer is None:
            return flat_NF
        if self._others is None:
            return self.normalizer(flat_NF)
        return flat_NF.index_copy_(1, self._others, self.normalizer(flat_NF[:, self._others]))

    def update(self, observation: Tree, valid_N: Tensor | None = None) -> None:
        """Take these observations into the statistics, if there are any."""
        if self.normalizer is not None and self._flatten is not None:
            flat_NF = self._flatten(observation)
            self.normalizer.update(flat_NF if self._others is None else flat_NF[:, self._others], valid_N)
