"""Heads: networks from features to a distribution over actions, and checks of the bounds of continuous actions.

Shapes: B rows, H features, A dimensions of an action, L choices of all integers of an action.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from rein.networks.mlp import orthogonal_linear
from rein.ops.distributions import BallNormal, Categorical, Distribution, MultiDiscrete, Normal, SquashedNormal
from rein.spaces import ACTION_MASK, children, choices, is_continuous
from rein.types import Tree


def width(space: spaces.Box) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return high - low, `(*A)`: not finite if float32 overflows, 0 if both bounds are equal in float32."""
    with np.errstate(over="ignore", invalid="ignore"):
        return space.high.astype(np.float32) - space.low.astype(np.float32)


def count_actions(space: spaces.Space[Any]) -> int:
    """Return the number of actions. Raises ValueError unless the action space is Discrete."""
    if not isinstance(space, spaces.Discrete):
        raise ValueError(f"the action space is {space}; this agent requires Discrete actions")
    return int(space.n)


def check_bounded(space: spaces.Space[Any]) -> spaces.Box:
    """Return the action space. Raises ValueError unless it is a Box of floats that can be mapped to [-1, 1]."""
    if not is_continuous(space) or not space.shape or 0 in space.shape or not has_width(space):
        raise ValueError(
            f"the action space is {space}; continuous actions need a Box with finite bounds, of one or more "
            "floating-point numbers, with low < high and high - low finite in float32"
        )
    return space


def has_width(space: spaces.Box) -> bool:
    """Return whether actions can be mapped to [-1, 1] and back.

    In float32, the bounds and high - low must be finite, and low < high.
    """
    width_A = width(space)
    return bool((np.isfinite(width_A) & (width_A > 0.0)).all())


class DiscreteHead(nn.Module):
    """Logits of one or several categorical actions: Discrete, MultiDiscrete, MultiBinary, or a Box of integers.

    Actions are int64.
    """

    start: Tensor

    def __init__(self, features: int, space: spaces.Space[Any], gain: float, generator: torch.Generator) -> None:
        super().__init__()
        self.single = isinstance(space, spaces.Discrete)
        self.sizes, start = choices(space)
        self._shape = None if self.single or len(start.shape) == 1 else start.shape  # None: that of a sample
        self.linear = orthogonal_linear(features, sum(self.sizes), gain, generator)
        self._shifts = bool(start.any())
        self.register_buffer(
            "start", torch.as_tensor(start, dtype=torch.int64, device=generator.device), persistent=False
        )

    def forward(self, features_BH: Tensor, mask_BL: Tensor | None = None) -> Distribution:
        """Return a Categorical or MultiDiscrete distribution over the choices that the boolean mask allows."""
        return self.distribution(self.linear(features_BH), mask_BL)

    def distribution(self, logits: Tensor, mask: Tensor | None = None) -> Distribution:
        """Return the distribution for an output of `linear`."""
        if self.single:
            return Categorical.from_logits(logits, mask)
        return MultiDiscrete.from_logits(logits, self.sizes, mask)

    def to_action(self, distribution: Distribution, sample: Tensor) -> Tensor:
        """Convert a sample to an action, `(N, *A)`, which counts from the smallest value in the space."""
        action = sample if self._shape is None else _shaped(sample, self._shape)
        return action + self.start if self._shifts else action

    def from_action(self, distribution: Distribution, action: Tensor) -> Tensor:
        """Convert an action to a sample."""
        sample = action - self.start if self._shifts else action
        return sample if self._shape is None else _flat(sample, self._shape)


class ContinuousHead(nn.Module):
    """Gaussian over a Box: its mean and log standard deviation, which is a parameter or an output of the network.

    Samples are vectors; actions have the shape of the Box.
    """

    low: Tensor
    high: Tensor

    def __init__(
        self,
        features: int,
        space: spaces.Box,
        generator: torch.Generator,
        *,
        gain: float,
        squash: bool | str | None,
        log_std: float,
        state_dependent_std: bool,
    ) -> None:
        super().__init__()
        squash = has_width(space) if squash is None else squash
        _check_squash(squash, space)
        self.squash, self.state_dependent_std = squash, state_dependent_std
        self._shape = None if len(space.shape) == 1 else space.shape  # None: that of a sample
        actions, device = math.prod(space.shape), generator.device
        self.linear = orthogonal_linear(features, actions * (1 + state_dependent_std), gain, generator)
        if state_dependent_std:
            with torch.no_grad():
                self.linear.bias[actions:] = log_std
        else:
            self.log_std = nn.Parameter(torch.full((actions,), log_std, dtype=torch.float32, device=device))
        for name, bound in (("low", space.low), ("high", space.high)):
            self.register_buffer(name, torch.as_tensor(bound, dtype=torch.float32, device=device).flatten(), False)

    def forward(self, features_BH: Tensor, mask: None = None) -> Distribution:
        """Return a clipped Normal, a SquashedNormal, or a BallNormal. Continuous actions have no mask."""
        return self.distribution(self.linear(features_BH))

    def distribution(self, output: Tensor, mask: None = None) -> Distribution:
        """Return the distribution for an output of `linear`."""
        mean, log_std = output.chunk(2, -1) if self.state_dependent_std else (output, self.log_std)
        if self.squash == "ball":
            return BallNormal(mean, log_std, self.high[0])
        kind = SquashedNormal if self.squash else Normal
        return kind(mean, log_std, self.low, self.high)

    def to_action(self, distribution: Distribution, sample: Tensor) -> Tensor:
        """Convert a sample to an action within the bounds, `(N, *A)`."""
        action = distribution.to_action(sample)
        return action if self._shape is None else _shaped(action, self._shape)

    def from_action(self, distribution: Distribution, action: Tensor) -> Tensor:
        """Convert an action to a sample."""
        return distribution.from_action(action if self._shape is None else _flat(action, self._shape))


class ProductHead(nn.Module):
    """Heads of the components of a Dict or Tuple. Samples and actions are dictionaries."""

    def __init__(self, heads: Mapping[str, ActionHead]) -> None:
        super().__init__()
        from rein.ops.distributions.product import Product

        self.names, self._product = tuple(heads), Product
        self.heads = nn.ModuleList(heads.values())

    def forward(self, features_BH: Tensor, masks: Mapping[str, Tree] | None = None) -> Distribution:
        """Return a Product of the distributions of all heads. Components without a mask are not restricted."""
        masks = masks or {}
        return self._product({name: head(features_BH, masks.get(name)) for name, head in self._named()})

    def to_action(self, distribution: Any, sample: Tree) -> Tree:
        """Convert a sample to an action. Returns the sample itself if no component changes."""
        factors = distribution.factors
        action = {name: head.to_action(factors[name], sample[name]) for name, head in self._named()}
        return sample if all(action[name] is sample[name] for name in action) else action

    def from_action(self, distribution: Any, action: Tree) -> Tree:
        """Convert an action to a sample."""
        factors = distribution.factors
        return {name: head.from_action(factors[name], action[name]) for name, head in self._named()}

    def _named(self) -> zip[tuple[str, Any]]:
        return zip(self.names, self.heads, strict=True)


ActionHead = DiscreteHead | ContinuousHead | ProductHead


def action_head(
    features: int,
    space: spaces.Space[Any],
    generator: torch.Generator,
    *,
    gain: float = 0.01,
    squash: bool | str | None = False,
    log_std: float = 0.0,
    state_dependent_std: bool = False,
) -> ActionHead:
    """Return the head for an action space: Discrete, MultiDiscrete, MultiBinary, Box, or a Dict or Tuple of these.

    Each integer of a Box is a categorical action. Samples of a Gaussian are clipped to the Box by default.

    Args:
        features: Number of input features.
        space: Action space.
        generator: Source of the initial parameters, which are on its device.
        gain: Gain of the orthogonal weights. A small gain starts with nearly equal probabilities (Andrychowicz et al.
            2021, "What matters for on-policy deep actor-critic methods?").
        squash: If True, map samples into the Box. "ball" maps them into the ball whose radius is the common bound of
            all sides. None squashes each Box with finite bounds and clips the others.
        log_std: Initial log standard deviation.
        state_dependent_std: If True, the log standard deviation is an output of the network, otherwise a parameter.

    Raises:
        ValueError: If the space is not supported or its bounds do not fit `squash`.
    """
    how: dict[str, Any] = {
        "gain": gain,
        "squash": squash,
        "log_std": log_std,
        "state_dependent_std": state_dependent_std,
    }
    inner = children(space)
    if inner is not None:
        return ProductHead({name: action_head(features, part, generator, **how) for name, part in inner.items()})
    if is_continuous(space):
        return ContinuousHead(features, space, generator, **how)
    return DiscreteHead(features, space, gain, generator)


def check_mask(space: spaces.Space[Any], action_space: spaces.Space[Any], path: str = ACTION_MASK) -> None:
    """Raise ValueError if action masks of a space do not fit the action space.

    A mask has one number for each choice: (n,) for Discrete, and the concatenated choices of every integer for
    MultiDiscrete, MultiBinary and a Box of integers. The mask of a Dict or Tuple is a dictionary of masks. Components
    without a mask are not restricted.
    """
    inner = children(action_space)
    if inner is not None:
        masks = children(space)
        if masks is None or not masks.keys() <= inner.keys():
            raise ValueError(
                f"{path} is a {space}, but the action space is {action_space}: give a Dict with masks for "
                f"{', '.join(inner)}"
            )
        for name, part in masks.items():
            check_mask(part, inner[name], f"{path}.{name}")
        return
    if is_continuous(action_space):
        raise ValueError(f"{path}: the action space is {action_space}; only discrete actions can be masked")
    count = sum(choices(action_space)[0])
    if space.shape != (count,):
        raise ValueError(
            f"{path} has the shape {space.shape}, but the action space is {action_space}: give the shape ({count},), "
            "one number for each choice"
        )


def _shaped(vector: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return vectors (..., A) in the shape of actions, `(..., *A)`."""
    return vector.reshape(*vector.shape[:-1], *shape)


def _flat(action: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return actions `(..., *A)` as vectors (..., A)."""
    return action.reshape(*action.shape[: action.ndim - len(shape)], math.prod(shape))


def _check_squash(squash: bool | str, space: spaces.Box) -> None:
    if isinstance(squash, str) and squash != "ball":
        raise ValueError(f'squash={squash!r}: use True, False or "ball"')
    if squash and not has_width(space):
        raise ValueError(
            f"squash={squash!r} needs an action space with finite bounds, low < high and high - low finite in float32,"
            f" got {space}"
        )
    if squash == "ball" and not space.high.size:
        raise ValueError(f'squash="ball" needs an action space of one or more numbers, got {space}')
    if squash == "ball" and not ((space.high == space.high.flat[0]) & (space.low == -space.high.flat[0])).all():
        raise ValueError(f'squash="ball" needs an action space with bounds -r and r on all sides, got {space}')
