"""A network of the user's own, in the place of the stem.

Shapes: B rows, F numbers of a flat observation, G features.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from rein.networks.stem import is_image, make_stem

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
