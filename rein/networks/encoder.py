"""Encoders: from observations to features, by flattening, normalization, convolutions or a custom network.

Shapes: N environments, B rows, F features.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from rein.networks.convolution import Convolution
from rein.networks.flatten import Flatten, Tree, tensors_of
from rein.networks.normalizers import ObservationNormalizer

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


class Encoder(nn.Module):
    """Observations of a space as (N, F) float32, normalized if asked for; images as they are.

    Images are the boxes for which `rein.networks.encoder.is_image` returns True; `images` tells whether there are any.
    An image alone is returned as it is, an image in a Dict or Tuple is flattened like all other parts.

    Bytes for which `rein.networks.encoder.scales` returns True are divided by 255: here if they are flattened,
    otherwise by the convolutions. With `scale_images=False` they become floats from 0 to 255. A stem of the user's own
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


StemFactory = Callable[[spaces.Space[Any], torch.Generator], nn.Module]  # (observation_space, generator) -> the stem

_VARYING = (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd)  # what they say varies, while they train


def stem_for(
    space: spaces.Space[Any], generator: torch.Generator, factory: StemFactory | None = None
) -> nn.Module | None:
    """What comes first in a network for observations of this space: the factory's, or without one `make_stem`'s.

    `factory(observation_space, generator)` makes a module with `features`, G, which gives (B, G) float32 of what the
    encoder makes of observations:

    - of an image that image as it is, (B, *space.shape) of the space's type: channels where the environment has them,
      bytes not divided by 255. An image is a Box of three dimensions, or of bytes of two or four, 36 pixels a side or
      more;
    - of everything else (B, F) float32, in the order of `rein.networks.flatten.Flatten`, which is the space's: the
      entries of a Box, also of one that is smaller than an image (`x.unflatten(1, space.shape)`), a one-hot vector of a
      Discrete, the parts of a Dict or Tuple one after the other, images among them as floats from 0 to 255. They are
      normalized before, where the agent was told to `normalize_observation`.

    What draws from torch's global generator, as torch's layers do when they are made, draws under `generator` and
    leaves the global one, the host's, as it was. The module is copied, so that no two networks share one, and moved to
    the generator's device. It says the same of a row whenever it is asked, so layers that drop features at random or
    look at the whole batch are refused, but for those in `eval()`.

    Raises TypeError for a factory that makes no module, ValueError for a module that is not as said above: it is tried
    with two rows of zeros.
    """
    if factory is None:
        return make_stem(space, generator)
    if isinstance(factory, nn.Module) or not callable(factory):
        kind = "a module" if isinstance(factory, nn.Module) else repr(factory)
        raise TypeError(
            f"stem is {kind}: give what makes the module, called as stem(observation_space, generator): "
            "a class, a function or a functools.partial"
        )
    with torch.random.fork_rng(devices=[]):
        seed = torch.randint(2**31 - 1, (), generator=generator, device=generator.device)
        torch.default_generator.manual_seed(int(seed))
        made = factory(space, generator)
        if not isinstance(made, nn.Module):
            raise TypeError(f"stem: it made a {type(made).__name__}; a torch.nn.Module is wanted, with `features`")
        made = made.to(generator.device)
        _try(made, space, generator.device)
    return copy.deepcopy(made)


def features_of(stem: nn.Module | None, otherwise: int) -> int:
    """How many numbers the layers after it see; those of the encoder where there is none."""
    return otherwise if stem is None else stem.features  # type: ignore[return-value]  # an int, as `_try` has seen


def through(stem: nn.Module | None, x: Tensor) -> Tensor:
    """What it makes of x; x itself where there is none."""
    return x if stem is None else stem(x)


def _try(stem: nn.Module, space: spaces.Space[Any], device: torch.device) -> None:
    """ValueError for what is no stem; layers that find their sizes in a first batch (`nn.LazyLinear`) find them."""
    kind, features = type(stem).__name__, getattr(stem, "features", None)
    if not isinstance(features, int) or isinstance(features, bool) or features < 1:
        raise ValueError(
            f"stem: {kind}.features is {'missing' if features is None else repr(features)[:80]}; the module says there "
            "how many numbers it puts out for an observation, as in `self.features = 64`"
        )
    if found := sorted(
        {type(part).__name__ for part in stem.modules() if isinstance(part, _VARYING) and part.training}
    ):
        raise ValueError(
            f"stem: there is {', '.join(found)} in {kind}, which would say another thing of an observation when it "
            "learns than when it acts: use nn.LayerNorm or nn.GroupNorm, or eval() on that part"
        )
    if is_image(space):
        zeros = torch.from_numpy(np.zeros((2, *(space.shape or ())), space.dtype)).to(device)
    else:
        zeros = torch.zeros(2, int(spaces.flatdim(space)), dtype=torch.float32, device=device)
    try:
        with torch.no_grad():
            found = stem(zeros)
    except Exception as error:  # of somebody else's module; gets a note, raised again
        error.add_note(f"stem: {kind} was given zeros {tuple(zeros.shape)} of {zeros.dtype}, two observations")
        raise
    if not isinstance(found, Tensor) or found.shape != (2, features) or found.dtype != torch.float32:
        said = f"{tuple(found.shape)} of {found.dtype}" if isinstance(found, Tensor) else f"a {type(found).__name__}"
        raise ValueError(
            f"stem: {kind} makes {said} of two observations {tuple(zeros.shape)} of {zeros.dtype}; (2, {features}) of "
            "torch.float32 is wanted, its `features` for each"
        )
