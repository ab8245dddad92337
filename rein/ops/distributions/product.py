"""Distributions over actions with several components, such as a discrete choice and a continuous amount.

Shapes: N rows (further dimensions may precede).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

Tree = Any  # a Tensor, or a (nested) dictionary of tensors


class Product(NamedTuple):
    """Independent components of an action, by name. A component may be a `Product` itself.

    Noise, samples and actions are dictionaries with the keys of the factors. Log-probabilities, entropies and KL
    divergences are sums over the factors. The log-density is with respect to the product of the counting measure of
    discrete components and the Lebesgue measure of continuous components.
    """

    factors: Mapping[str, Any]  # distributions over the components

    @property
    def log_std(self) -> Tensor | None:
        """Log standard deviations of all Gaussian factors, `(..., A)`; None without one."""
        log_stds = [factor.log_std for factor in self.factors.values() if getattr(factor, "log_std", None) is not None]
        if not log_stds:
            return None
        rows = torch.broadcast_shapes(*(each.shape[:-1] for each in log_stds))
        return torch.cat([each.expand(*rows, each.shape[-1]) for each in log_stds], -1)

    def noise(self, generator: torch.Generator) -> dict[str, Tree]:
        """Draw the random numbers of all factors, in their order."""
        return {key: factor.noise(generator) for key, factor in self.factors.items()}

    def sample_from(self, noise: Tree) -> dict[str, Tree]:
        """Return the sample for this noise."""
        return {key: factor.sample_from(noise[key]) for key, factor in self.factors.items()}

    def sample(self, generator: torch.Generator) -> dict[str, Tree]:
        """Draw a sample of all factors, in their order."""
        return {key: factor.sample(generator) for key, factor in self.factors.items()}

    def mode(self) -> dict[str, Tree]:
        """Return the modes of all factors."""
        return {key: factor.mode() for key, factor in self.factors.items()}

    def log_prob(self, sample: Tree) -> Tensor:
        """Return the log-probability or log-density, (N,), summed over the factors."""
        return _sum(factor.log_prob(sample[key]) for key, factor in self.factors.items())

    def entropy(self) -> Tensor:
        """Return the entropy in nats, (N,), summed over the factors."""
        return _sum(factor.entropy() for factor in self.factors.values())

    def kl(self, other: Product) -> Tensor:
        """Return the KL divergence in nats, (N,), summed over the factors."""
        return _sum(factor.kl(other.factors[key]) for key, factor in self.factors.items())

    def to_action(self, sample: Tree) -> dict[str, Tree]:
        """Convert the sample of each factor to an action."""
        return {key: factor.to_action(sample[key]) for key, factor in self.factors.items()}

    def from_action(self, action: Tree) -> dict[str, Tree]:
        """Convert the action of each factor to a sample."""
        return {key: factor.from_action(action[key]) for key, factor in self.factors.items()}


def _sum(terms: Iterable[Tensor]) -> Tensor:
    return functools.reduce(torch.add, terms)
