"""Distributions over actions: parameters in a NamedTuple, so they pass through `torch.compile` and `map_tree`.

All have one interface, `Distribution`, and an agent is written once for every action space:

    distribution = networks.policy(observation)
    sample = distribution.sample(generator)
    environment.apply_action(distribution.to_action(sample))     # the sample, clipped or squashed into its bounds
    ratio_N = (distribution.log_prob(sample) - old_log_prob_N).exp()

What is learned from is the sample, kept with the transition: an action that was clipped or squashed no longer tells its
probability exactly. `from_action` is for data that holds actions only.

Gradients reach the parameters through `log_prob`, `entropy` and `kl`, and through the sample itself for the continuous
ones. Random numbers may come from elsewhere: `sample_from(noise)` is a pure function, for a loss that is compiled.

Shapes: N rows (further dimensions may precede), A actions or dimensions of an action, K discrete actions in one.
"""

from __future__ import annotations

from typing import Protocol, Self

import torch
from torch import Tensor

from rein.ops.distributions.continuous import BallNormal, Normal, SquashedNormal
from rein.ops.distributions.discrete import Categorical, MultiDiscrete

__all__ = ["BallNormal", "Categorical", "Distribution", "MultiDiscrete", "Normal", "SquashedNormal"]


class Distribution(Protocol):
    """A distribution over the actions of N rows."""

    def noise(self, generator: torch.Generator) -> Tensor:
        """What `sample_from` makes a sample of."""
        ...

    def sample_from(self, noise: Tensor) -> Tensor:
        """The sample that this noise stands for."""
        ...

    def sample(self, generator: torch.Generator) -> Tensor:
        """A sample for each row; (N,) int64, (N, K) int64 or (N, A)."""
        ...

    def mode(self) -> Tensor:
        """The sample to take where nothing is left to chance."""
        ...

    def log_prob(self, sample: Tensor) -> Tensor:
        """Log-probability, or log-density of the action, summed over what one action is made of; (N,)."""
        ...

    def entropy(self) -> Tensor:
        """Entropy in nats; (N,)."""
        ...

    def kl(self, other: Self) -> Tensor:
        """KL(self || other) in nats; (N,)."""
        ...

    def to_action(self, sample: Tensor) -> Tensor:
        """The action that a sample stands for."""
        ...

    def from_action(self, action: Tensor) -> Tensor:
        """The sample that stands for an action."""
        ...
