"""Distributions over actions. Parameters are in a NamedTuple, so they pass through `torch.compile` and `map_tree`.

All share the interface `Distribution`, so that agents work with every action space::

    distribution = networks.policy(observation)
    sample = distribution.sample(generator)
    environment.apply_action(distribution.to_action(sample))     # the sample, clipped or squashed into its bounds
    ratio_N = (distribution.log_prob(sample) - old_log_prob_N).exp()

Agents learn from the sample, which is stored with the transition: a clipped or squashed action does not determine its
probability exactly. `from_action` is for data that contains only actions.

Gradients flow to the parameters through `log_prob`, `entropy` and `kl`, and through the sample for continuous
distributions. `sample_from(noise)` is a pure function of random numbers drawn elsewhere, for compiled losses.

An action with several components has a `Product`, whose samples and actions are dictionaries.

Shapes: N rows (further dimensions may precede), A actions or dimensions of an action, K simultaneous discrete actions.
"""

from __future__ import annotations

from typing import Any, Protocol, Self

import torch
from torch import Tensor

from rein.ops.distributions.continuous import BallNormal, Normal, SquashedNormal
from rein.ops.distributions.discrete import Categorical, MultiDiscrete

__all__ = ["BallNormal", "Categorical", "Distribution", "MultiDiscrete", "Normal", "SquashedNormal"]


Tree = Any  # a Tensor, or a dictionary of trees


class Distribution(Protocol):
    """Distribution over the actions of N rows."""

    def noise(self, generator: torch.Generator) -> Tree:
        """Draw the random numbers for `sample_from`."""
        ...

    def sample_from(self, noise: Tree) -> Tree:
        """Return the sample for this noise."""
        ...

    def sample(self, generator: torch.Generator) -> Tree:
        """Draw a sample for each row; (N,) int64, (N, K) int64, (N, A), or a dictionary of these."""
        ...

    def mode(self) -> Tree:
        """Return the deterministic (greedy) sample."""
        ...

    def log_prob(self, sample: Tree) -> Tensor:
        """Return the log-probability, or log-density of the action, summed over the components of an action; (N,)."""
        ...

    def entropy(self) -> Tensor:
        """Return the entropy in nats; (N,)."""
        ...

    def kl(self, other: Self) -> Tensor:
        """Return KL(self || other) in nats; (N,)."""
        ...

    def to_action(self, sample: Tree) -> Tree:
        """Convert a sample to an action."""
        ...

    def from_action(self, action: Tree) -> Tree:
        """Convert an action to a sample."""
        ...
