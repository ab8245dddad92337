"""Encoders map observations of any space to features.

`Preprocessor` flattens and normalizes observations, but keeps images. An encoder is the network before the hidden
layers: convolutions for images, or a custom network.

Shapes: N environments, B rows, F features, K one-hot vectors in a row.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from rein.networks.convolution import Convolution
from rein.networks.normalizers import ObservationNormalizer
from rein.networks.reserved import (
    ACTION_MASK,
    CRITIC_OBSERVATION,
    RESERVED,
    Inputs,
    entry,
    mask_of,
    visible,
    visible_space,
)

Tree = Any  # a Tensor, or a (nested) dictionary of tensors


class Flatten:
    """Flattens observations to float32 vectors (F,), like `gymnasium.spaces.flatten`, but N at once.

    Numbers are concatenated. Each Discrete and each entry of a MultiDiscrete becomes a one-hot vector, and the parts of
    a Dict or Tuple follow its order. Tensors for whose space `scales` returns True are divided by 255.
    """

    def __init__(
        self,
        space: spaces.Space[Any],
        device: torch.device | str = "cpu",
        *,
        scales: Callable[[spaces.Space[Any]], bool] = lambda _: False,
    ) -> None:
        """Create the flattening of a space. Raises TypeError if its observations are not tensors."""
        self.features = int(spaces.flatdim(space))
        self._parts = [_part(path, part, torch.device(device), scales(part)) for path, part in tensors_of(space)]
        self._plain = self._parts[0].places is None and not self._parts[0].scaled

    def __call__(self, observation: Tree) -> Tensor:
        """Return (N, F) float32, without a copy if possible. Raises ValueError for observations of another shape."""
        if isinstance(observation, Tensor) and observation.ndim == 2 and self._plain:
            flat_NF = observation.to(torch.float32)
        else:
            flat_NF = torch.cat([part.flat(observation) for part in self._parts], 1)
        if flat_NF.shape[1] != self.features:
            raise ValueError(
                f"expected observations of N environments with {self.features} numbers each, got {flat_NF.shape[1]}; "
                "for one environment, add a first dimension of 1"
            )
        return flat_NF


class _Part(NamedTuple):
    """One tensor of an observation and its place in the flat row."""

    path: tuple[str, ...]  # keys that lead to it
    places: Tensor | None  # (K,) offsets of its one-hot vectors, minus the smallest value; None for plain numbers
    width: int  # numbers in the row, if it is one-hot
    scaled: bool  # whether its numbers are divided by 255

    def flat(self, observation: Tree) -> Tensor:
        """Return the flat rows, (N, width) float32."""
        for key in self.path:
            if key not in observation:
                raise ValueError(f"the observation has no key {key!r}; it has {', '.join(map(str, observation))}")
            observation = observation[key]
        rows = observation.shape[0] if observation.ndim else 1
        if self.places is None:
            numbers_NF = observation.reshape(rows, -1).to(torch.float32)
            return numbers_NF / 255.0 if self.scaled else numbers_NF
        row_NF = torch.zeros(rows, self.width, dtype=torch.float32, device=observation.device)
        return row_NF.scatter_(1, observation.reshape(rows, -1) + self.places, 1.0)


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


def _part(path: tuple[str, ...], space: spaces.Space[Any], device: torch.device, scaled: bool) -> _Part:
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        discrete = isinstance(space, spaces.Discrete)
        size_K = np.atleast_1d(space.n if discrete else space.nvec).reshape(-1)
        start_K = np.atleast_1d(space.start).reshape(-1)
        first_K = np.cumsum(size_K) - size_K
        return _Part(
            path, torch.as_tensor(first_K - start_K, dtype=torch.int64, device=device), int(size_K.sum()), scaled
        )
    if isinstance(space, spaces.Box | spaces.MultiBinary):
        return _Part(path, None, 0, scaled)
    raise TypeError(f"observations of {space} are not tensors; use Box, Discrete, Multi..., Dict or Tuple")


SMALLEST_IMAGE = 36  # pixels per side; smaller images are flattened, because each cell of a grid has its own meaning
_FEATURES = 512  # per image


def scales(space: spaces.Space[Any]) -> bool:
    """Return whether bytes of this space are divided by 255: images for convolutions and small images."""
    return is_small_image(space) or (is_image(space) and space.dtype == np.uint8)


def is_small_image(space: spaces.Space[Any]) -> bool:
    """Return whether a space is a Box of bytes (0 to 255), with 1, 3 or 4 channels, too small for convolutions."""
    if not isinstance(space, spaces.Box) or space.dtype != np.uint8 or len(space.shape) != 3 or is_image(space):
        return False
    channels = {space.shape[0], space.shape[-1]} & {1, 3, 4}
    return bool(channels) and bool((space.low == 0).all() and (space.high == 255).all())


def has_small_images(space: spaces.Space[Any]) -> bool:
    """Return whether a space is a small image, or a Dict or Tuple that contains one."""
    return any(is_small_image(part) for _, part in tensors_of(space))


def is_image(space: spaces.Space[Any]) -> bool:
    """Return whether a space is a Box that `Convolution` treats as an image, and not too small."""
    size = Convolution.size_of(space)
    return size is not None and min(size) >= SMALLEST_IMAGE


def has_images(space: spaces.Space[Any]) -> bool:
    """Return whether a space is an image, or a Dict or Tuple that contains one."""
    return any(is_image(part) for _, part in tensors_of(space))


def default_encoder(space: spaces.Space[Any], generator: torch.Generator) -> Convolution | MixedEncoder | None:
    """Return the default encoder for observations of this space; None for vectors."""
    if is_image(space):
        return Convolution(space, _FEATURES, generator)
    return MixedEncoder(space, _FEATURES, generator) if has_images(space) else None


def other_columns(space: spaces.Space[Any], device: torch.device) -> Tensor:
    """Return which of the F numbers do not belong to an image, int64."""
    parts = [part for _, part in tensors_of(space)]
    widths = [int(spaces.flatdim(part)) for part in parts]
    other = np.repeat([not is_image(part) for part in parts], widths)
    return torch.as_tensor(np.flatnonzero(other), dtype=torch.int64, device=device)


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
        images, found = iter(self.images), []
        for part, (image, shape) in zip(x.split(self._widths, -1), self._places, strict=True):
            found.append(next(images)(part.unflatten(-1, shape)) if image else part)
        return torch.cat(found, -1)


class Preprocessor(nn.Module):
    """Converts observations to vectors (N, F) float32, normalized if `normalize` is set. A single image is unchanged.

    Images are the boxes for which `is_image` returns True; `images` is True if there are any. An image in a Dict or
    Tuple is flattened like all other parts.

    Bytes for which `scales` returns True are divided by 255: here if they are flattened, otherwise by the convolutions.
    With `scale_images=False` they become floats from 0 to 255. A custom encoder receives them unscaled, and a single
    image as bytes.

    With `masks` or `critic`, observations with the reserved entry become `Inputs`. Observations for acting may lack the
    critic observation.

    Only `update` changes the statistics of the normalizer. Agents call it between two rollouts, so that acting and
    learning see the same features. Policies share the statistics and never change them.
    """

    def __init__(
        self,
        space: spaces.Space[Any],
        device: torch.device,
        *,
        normalize: bool = False,
        scale_images: bool = True,
        custom_encoder: bool = False,
        masks: bool = False,
        critic: bool = False,
    ) -> None:
        """Create the preprocessor. Raises ValueError with `normalize` if the observations consist only of images."""
        super().__init__()
        self.masks = masks and entry(space, ACTION_MASK) is not None
        of_critic = entry(space, CRITIC_OBSERVATION) if critic else None
        self.critic = None if of_critic is None else _CriticPreprocessor(of_critic, device, normalize, scale_images)
        self.privileged = 0 if self.critic is None else self.critic.features  # features of a critic observation
        self.has_inputs = self.masks or self.critic is not None
        whole, space = space, visible_space(space)
        # key of the only entry that is not reserved; actors may receive a Dict of that entry alone
        others = {key: part for key, part in (children(whole) or {}).items() if key not in RESERVED}
        self._only = next((key for key, part in others.items() if part is space), None)
        self.images = has_images(space)
        self._dimensions = len(space.shape or ()) + 1
        scaling = {"scales": scales} if scale_images and not custom_encoder else {}
        self._flatten = None if is_image(space) else Flatten(space, device, **scaling)
        # convolutions scale bytes, so that unscaled images must be floats
        self._as_floats = not (scale_images or custom_encoder)
        self.features = 0 if self._flatten is None else self._flatten.features
        self._others = other_columns(space, device) if self.images else None  # those that are not images
        normalized = self.features if self._others is None else len(self._others)
        if normalize and not normalized:
            raise ValueError(
                f"normalize_observation=True: {space} contains only images, and images are not normalized; "
                "without a custom encoder, bytes are scaled to [0, 1]"
            )
        self.normalizer = ObservationNormalizer(normalized, device) if normalize else None

    @torch.no_grad()
    def forward(self, observation: Tree) -> Tensor | Inputs:
        """Return (N, F), or `Inputs`, see above.

        Raises TypeError unless observations are tensors, ValueError without a dimension N.
        """
        if not issubclass(type(observation), (Tensor, dict)):
            raise TypeError(f"observations must be tensors, got {type(observation).__name__}: use torch.as_tensor")
        features = self._features(self._visible(observation))
        if not self.has_inputs:
            return features
        mask = mask_of(observation) if self.masks else None
        critic = None
        if self.critic is not None and isinstance(observation, dict) and CRITIC_OBSERVATION in observation:
            critic = self.critic(observation[CRITIC_OBSERVATION])
        return Inputs(features, mask, critic)

    def _visible(self, observation: Tree) -> Tree:
        seen = visible(observation)
        if self._only is not None and seen is observation and isinstance(seen, dict) and seen.keys() == {self._only}:
            return seen[self._only]
        return seen

    def _features(self, observation: Tree) -> Tensor:
        if self._flatten is None:
            if observation.ndim < self._dimensions:
                raise ValueError(
                    f"expected images of N environments, got one of shape {tuple(observation.shape)}; "
                    "for one environment, add a first dimension of 1"
                )
            return observation.float() if self._as_floats else observation
        flat_NF = self._flatten(observation)
        if self.normalizer is None:
            return flat_NF
        if self._others is None:
            return self.normalizer(flat_NF)
        return flat_NF.index_copy_(1, self._others, self.normalizer(flat_NF[:, self._others]))

    def update(self, observation: Tree, valid_N: Tensor | None = None) -> None:
        """Update the statistics with these observations, if there are any."""
        if self.critic is not None:
            self.critic.update(observation[CRITIC_OBSERVATION], valid_N)
        if self.normalizer is not None and self._flatten is not None:
            flat_NF = self._flatten(self._visible(observation))
            self.normalizer.update(flat_NF if self._others is None else flat_NF[:, self._others], valid_N)


class _CriticPreprocessor(nn.Module):
    """Flattens critic observations of any space to (N, C) float32, and normalizes them if `normalize` is set."""

    def __init__(self, space: spaces.Space[Any], device: torch.device, normalize: bool, scale_images: bool) -> None:
        super().__init__()
        self._flatten = Flatten(space, device, **({"scales": scales} if scale_images else {}))
        self.features = self._flatten.features
        self.normalizer = ObservationNormalizer(self.features, device) if normalize else None

    def forward(self, observation: Tree) -> Tensor:
        """Return (N, C)."""
        flat_NC = self._flatten(observation)
        return flat_NC if self.normalizer is None else self.normalizer(flat_NC)

    def update(self, observation: Tree, valid_N: Tensor | None) -> None:
        """Update the statistics with these observations."""
        if self.normalizer is not None:
            self.normalizer.update(self._flatten(observation), valid_N)


EncoderFactory = Callable[[spaces.Space[Any], torch.Generator], nn.Module]  # (observation_space, generator) -> encoder

# their output varies between calls in training mode
_VARYING = (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd)


def encoder_for(
    space: spaces.Space[Any], generator: torch.Generator, factory: EncoderFactory | None = None
) -> nn.Module | None:
    """Return the encoder for observations of a space without reserved entries, from `factory` or the default.

    `factory(observation_space, generator)` must return a module with an attribute `features`, G. The module maps B
    preprocessed observations to (B, G) float32:

    - A single image is passed unchanged, `(B, *space.shape)` in the dtype of the space, with the channels where the
      environment has them. Bytes are not divided by 255.
    - Other observations are passed as (B, F) float32, flattened in the order of `Flatten` and normalized if the agent
      normalizes observations. Images in a Dict or Tuple are floats from 0 to 255.

    Layers that draw from torch's global generator draw from `generator` here; the global generator does not change. The
    module is copied, so that no two networks share it, and moved to the device of the generator. Layers whose output
    varies between calls, such as Dropout and BatchNorm, are rejected unless they are in `eval()`.

    Raises TypeError if the factory does not return a module, and ValueError if a trial with two rows of zeros fails.
    """
    space = visible_space(space)
    if factory is None:
        return default_encoder(space, generator)

    def trial(module: nn.Module) -> None:
        _try(module, space, generator.device)

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
        if found := {type(part).__name__ for part in module.modules() if _varies(part)}:
            raise ValueError(
                f"{option}: {type(module).__name__} contains {', '.join(sorted(found))}, whose output for an "
                "observation differs between acting and learning: use nn.LayerNorm or nn.GroupNorm, or call eval() on "
                "that part"
            )
        trial(module)
    return copy.deepcopy(module)


def _varies(part: nn.Module) -> bool:
    return isinstance(part, _VARYING) and part.training and getattr(part, "p", 1.0) > 0.0  # p: of Dropout


def features_of(encoder: nn.Module | None, otherwise: int) -> int:
    """Return the number of features of the encoder, or `otherwise` without an encoder."""
    return otherwise if encoder is None else encoder.features  # type: ignore[return-value]  # `_try` checks that it is an int


def through(encoder: nn.Module | None, x: Tensor) -> Tensor:
    """Return the features of x, or x itself without an encoder."""
    return x if encoder is None else encoder(x)


def _try(encoder: nn.Module, space: spaces.Space[Any], device: torch.device) -> None:
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
            found = encoder(zeros)
    except Exception as error:  # a custom module may raise anything
        error.add_note(f"encoder: {kind} was called with two observations, zeros {tuple(zeros.shape)} of {zeros.dtype}")
        raise
    if not isinstance(found, Tensor) or found.shape != (2, features) or found.dtype != torch.float32:
        got = f"{tuple(found.shape)} of {found.dtype}" if isinstance(found, Tensor) else f"a {type(found).__name__}"
        raise ValueError(
            f"encoder: {kind} returned {got} for two observations {tuple(zeros.shape)} of {zeros.dtype}; expected "
            f"(2, {features}) of torch.float32, according to its `features`"
        )
