"""Structure of spaces: their tensors, images, choices, and the reserved entries of observations.

`action_mask` is nonzero for each valid action. `critic_observation` is seen by critics only. Both are removed before
the encoder. A single remaining entry counts as the observation itself.

Shapes: N environments, A actions, B rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeGuard

import numpy as np
from gymnasium import spaces
from torch import Tensor

from rein.ops.trees import map_tree
from rein.types import Tree

ACTION_MASK, CRITIC_OBSERVATION = "action_mask", "critic_observation"
RESERVED = frozenset((ACTION_MASK, CRITIC_OBSERVATION))
_MOST_CHOICES = 1 << 16  # of one integer of a Box


def mask_of(observation: Tree) -> Tree | None:
    """Return the action mask (N, A) bool of observations, or a dictionary of masks; None without a mask."""
    if not isinstance(observation, dict) or ACTION_MASK not in observation:
        return None
    return map_tree(_as_bool, observation[ACTION_MASK])


def _as_bool(mask: Tensor) -> Tensor:
    return mask != 0


def entry(space: spaces.Space[Any], name: str) -> spaces.Space[Any] | None:
    """Return the space of a reserved entry; None if the observations have no such entry."""
    return space.spaces.get(name) if isinstance(space, spaces.Dict) else None


def visible_space(space: spaces.Space[Any]) -> spaces.Space[Any]:
    """Return the space of observations without their reserved entries.

    Raises ValueError if the observations have no other entry.
    """
    if not isinstance(space, spaces.Dict) or not RESERVED & space.spaces.keys():
        return space
    others = {name: part for name, part in space.spaces.items() if name not in RESERVED}
    if not others:
        raise ValueError(
            f"the observation space is {space}, which has only reserved entries ({', '.join(sorted(space.spaces))}): "
            "add an entry for the observation itself"
        )
    return next(iter(others.values())) if len(others) == 1 else spaces.Dict(others)


def visible(observation: Tree) -> Tree:
    """Return observations without their reserved entries."""
    if not isinstance(observation, dict) or not RESERVED & observation.keys():
        return observation
    others = {name: part for name, part in observation.items() if name not in RESERVED}
    return next(iter(others.values())) if len(others) == 1 else others


def children(space: spaces.Space[Any]) -> dict[str, spaces.Space[Any]] | None:
    """Return the spaces in a Dict or Tuple, by the keys of their tensors; None for a single tensor.

    Raises ValueError for an empty Dict or Tuple, and TypeError for a Box in another byte order than the machine's.
    """
    if isinstance(space, spaces.Box) and not space.dtype.isnative:
        native = space.dtype.newbyteorder("=")
        raise TypeError(f"{space}: torch does not support the byte order of {space.dtype.str}; use dtype=np.{native}")
    if isinstance(space, spaces.Dict | spaces.Tuple) and not len(space.spaces):
        raise ValueError(f"{space} is an empty space: an agent needs at least one Box, Discrete or other tensor")
    if isinstance(space, spaces.Dict):
        return dict(space.spaces)
    if isinstance(space, spaces.Tuple):
        return {str(index): inner for index, inner in enumerate(space.spaces)}
    return None


def map_space(function: Callable[[spaces.Space[Any]], Any], space: spaces.Space[Any]) -> Any:
    """Return `function(space)` of a single tensor, or a dictionary of the results for the parts of a Dict or Tuple."""
    inner = children(space)
    return function(space) if inner is None else {key: map_space(function, part) for key, part in inner.items()}


def tensors_of(
    space: spaces.Space[Any], path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], spaces.Space[Any]]]:
    """Yield the keys and spaces of the single tensors of an observation, in flattening order."""
    inner = children(space)
    if inner is None:
        yield path, space
        return
    for key, child in inner.items():
        yield from tensors_of(child, (*path, key))


def is_continuous(space: spaces.Space[Any]) -> TypeGuard[spaces.Box]:
    """Return whether an action space is a Box of floating-point numbers."""
    return isinstance(space, spaces.Box) and space.dtype.kind == "f"


def choices(space: spaces.Space[Any]) -> tuple[list[int], np.ndarray[Any, Any]]:
    """Return the number of choices of each integer of an action, in one list, and the smallest action, `(*A)`."""
    if isinstance(space, spaces.Discrete):
        return [int(space.n)], np.asarray(space.start)
    if isinstance(space, spaces.MultiDiscrete):
        return space.nvec.reshape(-1).tolist(), space.start
    if isinstance(space, spaces.MultiBinary):
        return [2] * math.prod(space.shape), np.zeros(space.shape, np.int64)
    if not isinstance(space, spaces.Box):
        raise ValueError(
            f"the action space is {space}; use Discrete, MultiDiscrete, MultiBinary, Box, or a Dict or Tuple of these"
        )
    number = space.high.astype(np.float64) - space.low.astype(np.float64) + 1.0
    if not number.size or (number > _MOST_CHOICES).any():
        raise ValueError(
            f"the action space is {space}; a Box of integers needs one or more numbers with at most {_MOST_CHOICES:,} "
            "values each: give narrower bounds, or use a Box of floating-point numbers and round the actions"
        )
    return number.astype(np.int64).reshape(-1).tolist(), space.low


SMALLEST_IMAGE = 36  # pixels per side; smaller images are flattened, because each cell of a grid has its own meaning


def scales(space: spaces.Space[Any]) -> bool:
    """Return whether bytes of this space are divided by 255: images for convolutions and small images."""
    return is_small_image(space) or (is_image(space) and space.dtype == np.uint8)


class ImageLayout(NamedTuple):
    """Memory layout of the images of a space."""

    shape: tuple[int, ...]
    frames: int
    channels_last: bool
    channels: int  # per frame
    size: tuple[int, int]  # height and width

    def channels_first(self, x: Tensor) -> Tensor:
        """Reshape `(..., *shape)` to (B, frames * channels, H, W)."""
        frame = (*self.size, self.channels) if self.channels_last else (self.channels, *self.size)
        image = x.reshape(-1, *(frame if self.frames == 1 else (self.frames, *frame)))
        if self.channels_last:
            image = image.movedim(-1, -3)
        return image if self.frames == 1 else image.flatten(1, 2)


def image_layout(space: spaces.Space[Any]) -> ImageLayout | None:
    """Return the memory layout if the space is an image of any size, else None."""
    if not isinstance(space, spaces.Box) or not (len(space.shape) == 3 or _may_be_images(space)):
        return None
    *frames, one, two, three = space.shape if len(space.shape) > 2 else (1, *space.shape)
    last = three < one
    height, width, channels = (one, two, three) if last else (two, three, one)
    return ImageLayout(space.shape, frames[0] if frames else 1, last, channels, (height, width))


def _may_be_images(box: spaces.Box) -> bool:
    """Return whether a Box holds bytes of two or four dimensions. Other dtypes of these shapes may be anything."""
    return box.dtype == np.uint8 and len(box.shape) in (2, 4)


def is_small_image(space: spaces.Space[Any]) -> bool:
    """Return whether a space is a Box of bytes (0 to 255), with 1, 3 or 4 channels, too small for convolutions."""
    if not isinstance(space, spaces.Box) or space.dtype != np.uint8 or len(space.shape) != 3 or is_image(space):
        return False
    channels = {space.shape[0], space.shape[-1]} & {1, 3, 4}
    return bool(channels) and bool((space.low == 0).all() and (space.high == 255).all())


def is_image(space: spaces.Space[Any]) -> bool:
    """Return whether a space is a Box that `Convolution` treats as an image, and not too small."""
    layout = image_layout(space)
    return layout is not None and min(layout.size) >= SMALLEST_IMAGE


def has_images(space: spaces.Space[Any]) -> bool:
    """Return whether a space is an image, or a Dict or Tuple that contains one."""
    return any(is_image(part) for _, part in tensors_of(space))
