"""Heads: networks from features to a distribution over actions, and checks of the bounds of continuous actions.

Shapes: B rows, H features, A dimensions of an action.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from rein.networks.mlp import orthogonal_linear
from rein.ops.distributions import BallNormal, Categorical, Distribution, MultiDiscrete, Normal, SquashedNormal


def width(space: spaces.Box) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return high - low, `(*A)`: not finite if float32 overflows, 0 if both bounds are equal in float32."""
    with np.errstate(over="ignore", invalid="ignore"):
        return space.high.astype(np.float32) - space.low.astype(np.float32)


def has_width(space: spaces.Box) -> bool:
    """Return whether actions can be mapped to [-1, 1] and back.

    In float32, the bounds and high - low must be finite, and low < high.
    """
    width_A = width(space)
    return bool((np.isfinite(width_A) & (width_A > 0.0)).all())


class DiscreteHead(nn.Module):
    """Logits of one or several categorical actions."""

    start: Tensor

    def __init__(self, features: int, space: spaces.Space[Any], gain: float, generator: torch.Generator) -> None:
        super().__init__()
        single = isinstance(space, spaces.Discrete)
        if not single and len(space.shape or ()) != 1:
            raise ValueError(f"the action space is {space}; a MultiDiscrete action must be a vector: flatten it")
        self.sizes = [int(space.n)] if single else np.asarray(space.nvec).reshape(-1).tolist()  # type: ignore[attr-defined]  # an attribute of MultiDiscrete
        self.single = single
        self.linear = orthogonal_linear(features, sum(self.sizes), gain, generator)
        start = np.asarray(space.start, np.int64)  # type: ignore[attr-defined]  # Discrete and MultiDiscrete have it
        self._shifts = bool(start.any())
        self.register_buffer(
            "start", torch.as_tensor(start, dtype=torch.int64, device=generator.device), persistent=False
        )

    def forward(self, features_BH: Tensor) -> Distribution:
        """Return a Categorical or MultiDiscrete distribution."""
        return self.distribution(self.linear(features_BH))

    def distribution(self, logits: Tensor) -> Distribution:
        """Return the distribution for an output of `linear`."""
        return Categorical.from_logits(logits) if self.single else MultiDiscrete.from_logits(logits, self.sizes)

    def to_action(self, distribution: Distribution, sample: Tensor) -> Tensor:
        """Convert a sample to an action, which counts from the `start` of the space."""
        return sample + self.start if self._shifts else sample

    def from_action(self, distribution: Distribution, action: Tensor) -> Tensor:
        """Convert an action to a sample."""
        return action - self.start if self._shifts else action


class ContinuousHead(nn.Module):
    """Gaussian over a Box: its mean and log standard deviation, which is a parameter or an output of the network."""

    low: Tensor
    high: Tensor

    def __init__(
        self,
        features: int,
        space: spaces.Box,
        generator: torch.Generator,
        *,
        gain: float,
        squash: bool | str,
        log_std: float,
        state_dependent_std: bool,
    ) -> None:
        super().__init__()
        if len(space.shape) != 1:
            raise ValueError(f"the action space is {space}; a continuous action must be a vector: flatten it")
        if space.dtype.kind != "f":
            raise ValueError(f"the action space is {space}; continuous actions must be floating-point numbers")
        _check_squash(squash, space)
        self.squash, self.state_dependent_std = squash, state_dependent_std
        actions, device = space.shape[0], generator.device
        self.linear = orthogonal_linear(features, actions * (1 + state_dependent_std), gain, generator)
        if state_dependent_std:
            with torch.no_grad():
                self.linear.bias[actions:] = log_std
        else:
            self.log_std = nn.Parameter(torch.full((actions,), log_std, dtype=torch.float32, device=device))
        for name, bound in (("low", space.low), ("high", space.high)):
            self.register_buffer(name, torch.as_tensor(bound, dtype=torch.float32, device=device), False)

    def forward(self, features_BH: Tensor) -> Distribution:
        """Return a clipped Normal, a SquashedNormal, or a BallNormal."""
        return self.distribution(self.linear(features_BH))

    def distribution(self, output: Tensor) -> Distribution:
        """Return the distribution for an output of `linear`."""
        mean, log_std = output.chunk(2, -1) if self.state_dependent_std else (output, self.log_std)
        if self.squash == "ball":
            return BallNormal(mean, log_std, self.high[0])
        kind = SquashedNormal if self.squash else Normal
        return kind(mean, log_std, self.low, self.high)

    def to_action(self, distribution: Distribution, sample: Tensor) -> Tensor:
        """Convert a sample to an action within the bounds."""
        return distribution.to_action(sample)

    def from_action(self, distribution: Distribution, action: Tensor) -> Tensor:
        """Convert an action to a sample."""
        return distribution.from_action(action)


def action_head(
    features: int,
    space: spaces.Space[Any],
    generator: torch.Generator,
    *,
    gain: float = 0.01,
    squash: bool | str = False,
    log_std: float = 0.0,
    state_dependent_std: bool = False,
) -> DiscreteHead | ContinuousHead:
    """Return the head for an action space: Discrete, MultiDiscrete or a floating-point Box of one dimension.

    Samples of a Gaussian are clipped to the Box by default.

    Args:
        features: Number of input features.
        space: Action space.
        generator: Source of the initial parameters, which are on its device.
        gain: Gain of the orthogonal weights. A small gain starts with nearly equal probabilities (Andrychowicz et al.
            2021, "What matters for on-policy deep actor-critic methods?").
        squash: If True, map samples into the Box. "ball" maps them into the ball whose radius is the common bound of
            all sides.
        log_std: Initial log standard deviation.
        state_dependent_std: If True, the log standard deviation is an output of the network, otherwise a parameter.

    Raises:
        ValueError: If the space is not supported or its bounds do not fit `squash`.
    """
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        return DiscreteHead(features, space, gain, generator)
    if isinstance(space, spaces.Box):
        how = {"gain": gain, "squash": squash, "log_std": log_std, "state_dependent_std": state_dependent_std}
        return ContinuousHead(features, space, generator, **how)
    raise ValueError(f"the action space is {space}; use Discrete, MultiDiscrete or Box")


def _check_squash(squash: bool | str, space: spaces.Box) -> None:
    if isinstance(squash, str) and squash != "ball":
        raise ValueError(f'squash={squash!r}: use True, False or "ball"')
    if squash and not has_width(space):
        raise ValueError(
            f"squash={squash!r} needs an action space with finite bounds, low < high and high - low finite in float32,"
            f" got {space}"
        )
    if squash == "ball" and not space.shape[0]:
        raise ValueError(f'squash="ball" needs an action space of one or more numbers, got {space}')
    if squash == "ball" and not (np.equal(space.high, space.high[0]) & np.equal(space.low, -space.high[0])).all():
        raise ValueError(f'squash="ball" needs an action space with bounds -r and r on all sides, got {space}')
