"""Heads: from features to a distribution over actions, and the bounds of continuous actions.

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
    """high - low (*A): not finite where float32 has no such number, 0 where it has the same one for both bounds."""
    with np.errstate(over="ignore", invalid="ignore"):
        return space.high.astype(np.float32) - space.low.astype(np.float32)


def has_width(space: spaces.Box) -> bool:
    """Whether actions can be mapped to [-1, 1] and back: finite bounds, low < high, high - low finite, in float32."""
    width_A = width(space)
    return bool((np.isfinite(width_A) & (width_A > 0.0)).all())


class DiscreteHead(nn.Module):
    """Logits of one or several categorical actions."""

    start: Tensor

    def __init__(self, features: int, space: spaces.Space[Any], gain: float, generator: torch.Generator) -> None:
        super().__init__()
        single = isinstance(space, spaces.Discrete)
        if not single and len(space.shape or ()) != 1:
            raise ValueError(f"the action space is {space}; an action of several choices is a vector: flatten it")
        self.sizes = [int(space.n)] if single else np.asarray(space.nvec).reshape(-1).tolist()  # type: ignore[attr-defined]  # MultiDiscrete's
        self.single = single
        self.linear = orthogonal_linear(features, sum(self.sizes), gain, generator)
        start = np.asarray(space.start, np.int64)  # type: ignore[attr-defined]  # both have it
        self._shifts = bool(start.any())
        self.register_buffer(
            "start", torch.as_tensor(start, dtype=torch.int64, device=generator.device), persistent=False
        )

    def forward(self, features_BH: Tensor) -> Distribution:
        """Categorical, or MultiDiscrete."""
        return self.distribution(self.linear(features_BH))

    def distribution(self, logits: Tensor) -> Distribution:
        """That of what `linear` puts out."""
        return Categorical.from_logits(logits) if self.single else MultiDiscrete.from_logits(logits, self.sizes)

    def to_action(self, distribution: Distribution, sample: Tensor) -> Tensor:
        """The action that a sample stands for: counted from the space's `start`."""
        return sample + self.start if self._shifts else sample

    def from_action(self, distribution: Distribution, action: Tensor) -> Tensor:
        """The sample that stands for an action."""
        return action - self.start if self._shifts else action


class ContinuousHead(nn.Module):
    """A Gaussian over a Box: its mean, and of its standard deviation the logarithm, free or of the observation too."""

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
            raise ValueError(f"the action space is {space}; a continuous action is a vector: flatten it")
        if space.dtype.kind != "f":
            raise ValueError(f"the action space is {space}; continuous actions are floating-point numbers")
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
        """Normal, clipped to the bounds, SquashedNormal, or BallNormal."""
        return self.distribution(self.linear(features_BH))

    def distribution(self, output: Tensor) -> Distribution:
        """That of what `linear` puts out."""
        mean, log_std = output.chunk(2, -1) if self.state_dependent_std else (output, self.log_std)
        if self.squash == "ball":
            return BallNormal(mean, log_std, self.high[0])
        kind = SquashedNormal if self.squash else Normal
        return kind(mean, log_std, self.low, self.high)

    def to_action(self, distribution: Distribution, sample: Tensor) -> Tensor:
        """The action that a sample stands for, within the bounds."""
        return distribution.to_action(sample)

    def from_action(self, distribution: Distribution, action: Tensor) -> Tensor:
        """The sample that stands for an action."""
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
    """The head for an action space: Discrete, or a MultiDiscrete or a floating-point Box of one dimension.

    A Gaussian's samples are clipped to the Box, or with `squash` mapped into it: with "ball" into the ball within it,
    whose radius is the bound that all its sides share. Its log standard deviation begins at `log_std`, and is a
    parameter, or with `state_dependent_std` a second output of the network.

    A small `gain` begins with nearly equal probabilities (Andrychowicz et al. 2021, "What matters for on-policy deep
    actor-critic methods?"). Raises ValueError for other spaces, and for bounds that do not fit `squash`.
    """
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        return DiscreteHead(features, space, gain, generator)
    if isinstance(space, spaces.Box):
        how = {"gain": gain, "squash": squash, "log_std": log_std, "state_dependent_std": state_dependent_std}
        return ContinuousHead(features, space, generator, **how)
    raise ValueError(f"the action space is {space}; there is a head for Discrete, MultiDiscrete and Box")


def _check_squash(squash: bool | str, space: spaces.Box) -> None:
    if isinstance(squash, str) and squash != "ball":
        raise ValueError(f'squash={squash!r}: use True, False or "ball"')
    if squash and not has_width(space):
        raise ValueError(
            f"squash={squash!r} needs an action space with finite bounds, low < high and high - low finite in float32,"
            f" not {space}"
        )
    if squash == "ball" and not space.shape[0]:
        raise ValueError(f'squash="ball" needs an action space of one or more numbers, not {space}')
    if squash == "ball" and not (np.equal(space.high, space.high[0]) & np.equal(space.low, -space.high[0])).all():
        raise ValueError(f'squash="ball" needs an action space with bounds -r and r on all sides, not {space}')
