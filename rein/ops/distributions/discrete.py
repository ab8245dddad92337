"""Distributions over discrete actions.

Shapes: N rows (further dimensions may precede), A actions, K simultaneous actions, L logits of all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

_FEW_ACTIONS = 16


class Categorical(NamedTuple):
    """Categorical distribution over A actions. All quantities are exact."""

    log_probs: Tensor  # (N, A), their exponentials sum to 1

    @staticmethod
    def from_logits(logits_NA: Tensor, mask_NA: Tensor | None = None) -> Categorical:
        """Return a softmax over the actions that the boolean mask allows. All others have probability exactly 0.

        A row without an allowed action, such as an invalid row, is uniform over all actions.
        """
        return Categorical(_log_softmax(_mask(logits_NA, mask_NA)))

    def noise(self, generator: torch.Generator) -> Tensor:
        """Draw uniform numbers in [0, 1); (N,)."""
        return torch.rand(
            self.log_probs.shape[:-1], generator=generator, dtype=torch.float32, device=self.log_probs.device
        )

    def sample_from(self, noise: Tensor) -> Tensor:
        """Return the first action at which the cumulative probability exceeds the noise; (N,) int64.

        The noise is scaled by the rounded sum of probabilities and so stays below it. An action with probability 0 is
        therefore never returned.
        """
        cumulative_NA = self.log_probs.exp().cumsum(-1)
        threshold_N1 = noise.unsqueeze(-1) * cumulative_NA[..., -1:]
        return (cumulative_NA[..., :-1] <= threshold_N1).sum(-1)

    def sample(self, generator: torch.Generator) -> Tensor:
        """Draw an action for each row, (N,) int64, from one random number each."""
        return self.sample_from(self.noise(generator))

    def mode(self) -> Tensor:
        """Return the first of the most likely actions, (N,) int64."""
        return self.log_probs.argmax(-1)

    def log_prob(self, sample: Tensor) -> Tensor:
        """Return the log-probability, (N,). For masked actions it is finite and so low that its exponential is 0."""
        return self.log_probs.gather(-1, sample.long().unsqueeze(-1)).squeeze(-1)

    def entropy(self) -> Tensor:
        """Return the entropy in nats, (N,)."""
        return -(self.log_probs.exp() * self.log_probs).sum(-1)

    def kl(self, other: Categorical) -> Tensor:
        """Return the KL divergence in nats, (N,). It is huge if `other` masks more actions than this distribution."""
        return (self.log_probs.exp() * (self.log_probs - other.log_probs)).sum(-1)

    def to_action(self, sample: Tensor) -> Tensor:
        """Return the sample unchanged."""
        return sample

    def from_action(self, action: Tensor) -> Tensor:
        """Return the action unchanged."""
        return action


class MultiDiscrete(NamedTuple):
    """K independent categorical actions. All quantities are exact."""

    log_probs: Tensor  # (N, K, A), A the largest number of choices; missing choices are masked

    @staticmethod
    def from_logits(logits_NL: Tensor, sizes: Sequence[int], mask_NL: Tensor | None = None) -> MultiDiscrete:
        """Return K categoricals from adjacent logits in one row, `sizes` choices each. The mask is as in `Categorical`.

        Raises ValueError if the sum of the sizes differs from the number of logits.
        """
        if sum(sizes) != logits_NL.shape[-1]:
            raise ValueError(f"sizes {tuple(sizes)} add up to {sum(sizes)}, but a row has {logits_NL.shape[-1]} logits")
        parts = _mask(logits_NL, mask_NL).split(list(sizes), -1)
        # lower than masked choices, so that an integer without an allowed choice is uniform over its own choices
        lowest, most = 1.5 * _lowest(logits_NL), max(sizes)
        padded = [F.pad(part, (0, most - part.shape[-1]), value=lowest) for part in parts]
        return MultiDiscrete(_log_softmax(torch.stack(padded, -2)))

    def noise(self, generator: torch.Generator) -> Tensor:
        """Draw uniform numbers in [0, 1); (N, K)."""
        return Categorical(self.log_probs).noise(generator)

    def sample_from(self, noise: Tensor) -> Tensor:
        """Return the sample for the noise, as for K categoricals; (N, K) int64."""
        return Categorical(self.log_probs).sample_from(noise)

    def sample(self, generator: torch.Generator) -> Tensor:
        """Draw K actions for each row, (N, K) int64."""
        return self.sample_from(self.noise(generator))

    def mode(self) -> Tensor:
        """Return the first of the most likely choices, (N, K) int64."""
        return self.log_probs.argmax(-1)

    def log_prob(self, sample: Tensor) -> Tensor:
        """Return the log-probability, (N,), summed over the K actions."""
        return Categorical(self.log_probs).log_prob(sample).sum(-1)

    def entropy(self) -> Tensor:
        """Return the entropy in nats, (N,), summed over the K actions."""
        return Categorical(self.log_probs).entropy().sum(-1)

    def kl(self, other: MultiDiscrete) -> Tensor:
        """Return the KL divergence in nats, (N,), summed over the K actions."""
        return Categorical(self.log_probs).kl(Categorical(other.log_probs)).sum(-1)

    def to_action(self, sample: Tensor) -> Tensor:
        """Return the sample unchanged."""
        return sample

    def from_action(self, action: Tensor) -> Tensor:
        """Return the action unchanged."""
        return action


def _lowest(logits: Tensor) -> float:
    """Return the logit of masked actions: finite, since 0 * infinity is NaN, and far from overflow."""
    return torch.finfo(logits.dtype).min / 2


def _mask(logits: Tensor, mask: Tensor | None) -> Tensor:
    return logits if mask is None else logits.masked_fill(~mask, _lowest(logits))


def _log_softmax(logits: Tensor) -> Tensor:
    """Apply log-softmax to the last dimension. For few actions torch is up to six times faster along the first one."""
    if logits.shape[-1] < _FEW_ACTIONS:
        return logits.transpose(0, -1).log_softmax(0).transpose(0, -1)
    return logits.log_softmax(-1)
