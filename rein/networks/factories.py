"""Modules from factories of the user: encoders and other networks.

Shapes: B rows, F features.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from rein.spaces import is_image

if TYPE_CHECKING:
    from rein.networks.encoder import EncoderFactory

# their output varies between calls in training mode
_VARYING = (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd)


def custom_encoder(space: spaces.Space[Any], generator: torch.Generator, factory: EncoderFactory) -> nn.Module:
    """Return the encoder from a factory, see `rein.networks.encoder.encoder_for`."""

    def trial(module: nn.Module) -> None:
        _check_encoder(module, space, generator.device)

    return from_factory("encoder", factory, {"observation_space": space}, generator, trial)


def from_factory(
    option: str,
    factory: Callable[..., Any],
    of_spaces: Mapping[str, spaces.Space[Any]],
    generator: torch.Generator,
    trial: Callable[[nn.Module], None],
) -> nn.Module:
    """Return a copy of the module that `factory(*spaces, generator)` returns, on the device of the generator.

    Layers that draw from torch's global generator draw from `generator` here; the global generator does not change.

    Args:
        option: Name of the agent's option, for error messages.
        factory: Factory of the module.
        of_spaces: Spaces that the factory receives, by the names of its arguments.
        generator: Source of the initial parameters.
        trial: Function that calls the module and raises ValueError for an unsuitable output. Lazy layers, such as
            `nn.LazyLinear`, are initialized by this call.

    Raises:
        TypeError: If `factory` is not a factory, or does not return a module.
        ValueError: If the output of a layer varies between calls.
    """
    if isinstance(factory, nn.Module) or not callable(factory):
        kind = "a module" if isinstance(factory, nn.Module) else repr(factory)
        raise TypeError(
            f"{option} is {kind}: pass a factory that is called as {option}({', '.join(of_spaces)}, generator) and "
            "returns the module, such as a class, a function or a functools.partial"
        )
    with torch.random.fork_rng(devices=[]):
        seed = torch.randint(2**31 - 1, (), generator=generator, device=generator.device)
        torch.default_generator.manual_seed(int(seed))
        module = factory(*of_spaces.values(), generator)
        if not isinstance(module, nn.Module):
            raise TypeError(f"{option}: expected a torch.nn.Module from the factory, got {type(module).__name__}")
        module = module.to(generator.device)
        if varying := {type(part).__name__ for part in module.modules() if _varies(part)}:
            raise ValueError(
                f"{option}: {type(module).__name__} contains {', '.join(sorted(varying))}, whose output for an "
                "observation differs between acting and learning: use nn.LayerNorm or nn.GroupNorm, or call eval() on "
                "that part"
            )
        trial(module)
    return copy.deepcopy(module)


def _varies(part: nn.Module) -> bool:
    return isinstance(part, _VARYING) and part.training and getattr(part, "p", 1.0) > 0.0  # p: of Dropout


def _check_encoder(encoder: nn.Module, space: spaces.Space[Any], device: torch.device) -> None:
    """Raise ValueError for an unsuitable encoder."""
    kind, features = type(encoder).__name__, getattr(encoder, "features", None)
    if not isinstance(features, int) or isinstance(features, bool) or features < 1:
        raise ValueError(
            f"encoder: {kind}.features is {'missing' if features is None else repr(features)[:80]}; set it to the "
            "number of features of an observation, as in `self.features = 64`"
        )
    if is_image(space):
        zeros = torch.from_numpy(np.zeros((2, *(space.shape or ())), space.dtype)).to(device)
    else:
        zeros = torch.zeros(2, int(spaces.flatdim(space)), dtype=torch.float32, device=device)
    try:
        with torch.no_grad():
            returned = encoder(zeros)
    except Exception as error:  # a custom module may raise anything
        error.add_note(f"encoder: {kind} was called with two observations, zeros {tuple(zeros.shape)} of {zeros.dtype}")
        raise
    if not isinstance(returned, Tensor) or returned.shape != (2, features) or returned.dtype != torch.float32:
        got = (
            f"{tuple(returned.shape)} of {returned.dtype}"
            if isinstance(returned, Tensor)
            else f"a {type(returned).__name__}"
        )
        raise ValueError(
            f"encoder: {kind} returned {got} for two observations {tuple(zeros.shape)} of {zeros.dtype}; expected "
            f"(2, {features}) of torch.float32, according to its `features`"
        )
