"""Encoders map observations of any space to features.

`Preprocessor` flattens and normalizes observations, but keeps images. An encoder is the network before the hidden
layers: convolutions for images, or a custom network.

Shapes: N environments, B rows, F features, K one-hot vectors in a row, A actions, C features of a critic observation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from rein.networks.normalizers import ObservationNormalizer
from rein.spaces import (
    ACTION_MASK,
    CRITIC_OBSERVATION,
    RESERVED,
    children,
    entry,
    has_images,
    is_image,
    mask_of,
    scales,
    tensors_of,
    visible,
    visible_space,
)
from rein.types import Tree


class Inputs(NamedTuple):
    """Inputs of a network whose observations have reserved entries."""

    features: Tensor  # (B, F), or images
    action_mask: Tree | None = None  # (B, A) bool, or a dictionary of masks; None if every action is valid
    critic: Tensor | None = None  # (B, C), features of the critic observation


Features = Tensor | Inputs  # result of `Preprocessor`


def inputs_of(x: Tensor | Inputs) -> Inputs:
    """Return inputs unchanged, and a tensor of features as inputs without reserved entries."""
    return x if isinstance(x, Inputs) else Inputs(x)


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


def other_columns(space: spaces.Space[Any], device: torch.device) -> Tensor:
    """Return which of the F numbers do not belong to an image, int64."""
    parts = [part for _, part in tensors_of(space)]
    widths = [int(spaces.flatdim(part)) for part in parts]
    other = np.repeat([not is_image(part) for part in parts], widths)
    return torch.as_tensor(np.flatnonzero(other), dtype=torch.int64, device=device)


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


# (observation_space, action_space, generator) -> module, see rein.networks.custom_networks
NetworkFactory = Callable[[spaces.Space[Any], spaces.Space[Any], torch.Generator], nn.Module]
EncoderFactory = Callable[[spaces.Space[Any], torch.Generator], nn.Module]  # (observation_space, generator) -> encoder


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
    if factory is not None:
        from rein.networks.factories import custom_encoder

        return custom_encoder(space, generator, factory)
    if not has_images(space):
        return None
    from rein.networks.convolution import image_encoder

    return image_encoder(space, generator)


def features_of(encoder: nn.Module | None, otherwise: int) -> int:
    """Return the number of features of the encoder, or `otherwise` without an encoder."""
    return otherwise if encoder is None else encoder.features  # type: ignore[return-value]  # `_try` checks that it is an int


def through(encoder: nn.Module | None, x: Tensor) -> Tensor:
    """Return the features of x, or x itself without an encoder."""
    return x if encoder is None else encoder(x)
