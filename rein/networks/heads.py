"""From features to a distribution over the actions of any action space.

Shapes: B rows, H features, A numbers that an action is made of.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from rein.networks.mlp import orthogonal_linear
from rein.ops.distributions import Categorical, Distribution, MultiDiscrete, Normal, SquashedNormal


class DiscreteHead(nn.Module):
    """Logits of one or several categorical actions."""

    start: Tensor

    def __init__(self, features: int, space: spaces.Space[Any], gain: float, generator: torch.Generator) -> None:
        super().__init__()
        single = isinstance(space, spaces.Discrete)
        self.sizes = [int(space.n)] if single else np.asarray(space.nvec).reshape(-1).tolist()  # type: ignore[attr-defined]
        self.single = single
        self.linear = orthogonal_linear(features, sum(self.sizes), gain, generator)
        start = np.asarray(space.start, np.int64)  # type: ignore[attr-defined]
        self._shifts = bool(start.any())
        self.register_buffer("start", torch.as_tensor(start, device=generator.device), persistent=False)

    def forward(self, features_BH: Tensor) -> Distribution:
        """Categorical, or MultiDiscrete."""
        logits = self.linear(features_BH)
        return Categorical.from_logits(logits) if self.single else MultiDiscrete.from_logits(logits, self.sizes)

    def to_action(self, distribution: Distribution, sample: Tensor) -> Tensor:
        """The action that a sample stands for: counted from the space's `start`."""
        return sample + self.start if self._shifts else sample

    def from_action(self, distribution: Distribution, action: Tensor) -> Tensor:
        """The sample that stands for an action."""
        return action - self.start if self._shifts else action


class ContinuousHead(nn.Module):
    """Mean of a Gaussian over a Box, whose log standard deviation does not depend on the observation."""

    def __init__(
        self, features: int, space: spaces.Box, gain: float, squash: bool, log_std: float, generator: torch.Generator
    ) -> None:
        super().__init__()
        if len(space.shape) != 1:
            raise ValueError(f"the action space is {space}; a continuous action is a vector: flatten it")
        if squash and not np.isfinite([space.low, space.high]).all():
            raise ValueError(f"squash=True needs an action space with finite bounds, not {space}")
        self.squash = squash
        self.linear = orthogonal_linear(features, space.shape[0], gain, generator)
        self.log_std = nn.Parameter(torch.full((space.shape[0],), log_std, device=generator.device))
        for name, bound in (("low", space.low), ("high", space.high)):
            self.register_buffer(name, torch.as_tensor(bound, dtype=torch.float32, device=generator.device), False)

    def forward(self, features_BH: Tensor) -> Distribution:
        """Normal, clipped to the bounds, or SquashedNormal."""
        kind = SquashedNormal if self.squash else Normal
        return kind(self.linear(features_BH), self.log_std, self.low, self.high)  # type: ignore[arg-type]

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
    squash: bool = False,
    log_std: float = 0.0,
) -> DiscreteHead | ContinuousHead:
    """The head for an action space: Discrete, MultiDiscrete or a Box of one dimension.

    A small `gain` begins with nearly equal probabilities (Andrychowicz et al. 2021, "What matters for on-policy deep
    actor-critic methods?"). Raises ValueError for other spaces.
    """
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        return DiscreteHead(features, space, gain, generator)
    if isinstance(space, spaces.Box):
        return ContinuousHead(features, space, gain, squash, log_std, generator)
    raise ValueError(f"the action space is {space}; there is a head for Discrete, MultiDiscrete and Box")
