"""Distributions over discrete actions.

Shapes: N rows (further dimensions may precede), A actions, K actions at once, L the logits of all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

_FEW_ACTIONS = 16


class Categorical(NamedTuple):
    """One of A actions; everything about it is exact."""

    log_probs: Tensor  # (N, A), their exponentials sum to 1

    @staticmethod
    def from_logits(logits_NA: Tensor, mask_NA: Tensor | None = None) -> Categorical:
        """Softmax over the actions that the boolean mask allows; all others have probability 0, exactly.

        A row that allows no action, as where there is no transition, is uniform over all.
        """
        return Categorical(_log_softmax(_mask(logits_NA, mask_NA)))

    def noise(self, generator: torch.Generator) -> Tensor:
        """Uniform on [0, 1); (N,)."""
        return torch.rand(
            self.log_probs.shape[:-1], generator=generator, dtype=torch.float32, device=self.log_probs.device
        )

    def sample_from(self, noise: Tensor) -> Tensor:
        """The first action at which the cumulative probability exceeds the noise; (N,) int64.

        The noise is scaled by the sum as it was rounded, so that it stays below it: none but the last action with a
        probability can be last, and an action without one adds nothing and is passed over.
        """
        cumulative_NA = self.log_probs.exp().cumsum(-1)
        threshold_N1 = noise.unsqueeze(-1) * cumulative_NA[..., -1:]
        return (cumulative_NA[..., :-1] <= threshold_N1).sum(-1)

    def sample(self, generator: torch.Generator) -> Tensor:
        """An action for each row, (N,) int64, for one random number each."""
        return self.sample_from(self.noise(generator))

    def mode(self) -> Tensor:
        """The first of the most likely actions, (N,) int64."""
        return self.log_probs.argmax(-1)

    def log_prob(self, sample: Tensor) -> Tensor:
        """(N,); of an action that is masked out, a negative number so large that its exponential is 0."""
        return self.log_probs.gather(-1, sample.long().unsqueeze(-1)).squeeze(-1)

    def entropy(self) -> Tensor:
        """(N,)."""
        return -(self.log_probs.exp() * self.log_probs).sum(-1)

    def kl(self, other: Categorical) -> Tensor:
        """(N,); huge where `other` masks out what this one does not."""
        return (self.log_probs.exp() * (self.log_probs - other.log_probs)).sum(-1)

    def to_action(self, sample: Tensor) -> Tensor:
        """The sample."""
        return sample

    def from_action(self, action: Tensor) -> Tensor:
        """The action."""
        return action


class MultiDiscrete(NamedTuple):
    """K actions at once, each one of several and independent of the others; everything about it is exact."""

    log_probs: Tensor  # (N, K, A), A the largest number of choices; those that an action does not have are masked out

    @staticmethod
    def from_logits(logits_NL: Tensor, sizes: Sequence[int], mask_NL: Tensor | None = None) -> MultiDiscrete:
        """K categoricals side by side in one row of logits, `sizes` choices each; the mask as in `Categorical`.

        Raises ValueError where the sizes do not add up to the logits.
        """
        if sum(sizes) != logits_NL.shape[-1]:
            raise ValueError(f"sizes {tuple(sizes)} add up to {sum(sizes)}, but a row has {logits_NL.shape[-1]} logits")
        parts = _mask(logits_NL, mask_NL).split(list(sizes), -1)
        lowest, most = _lowest(logits_NL), max(sizes)
        padded = [F.pad(part, (0, most - part.shape[-1]), value=lowest) for part in parts]
        return MultiDiscrete(_log_softmax(torch.stack(padded, -2)))

    def noise(self, generator: torch.Generator) -> Tensor:
        """Uniform on [0, 1); (N, K)."""
        return Categorical(self.log_probs).noise(generator)

    def sample_from(self, noise: Tensor) -> Tensor:
        """As for K categoricals; (N, K) int64."""
        return Categorical(self.log_probs).sample_from(noise)

    def sample(self, generator: torch.Generator) -> Tensor:
        """K actions for each row, (N, K) int64."""
        return self.sample_from(self.noise(generator))

    def mode(self) -> Tensor:
        """The first of the most likely choices, (N, K) int64."""
        return self.log_probs.argmax(-1)

    def log_prob(self, sample: Tensor) -> Tensor:
        """(N,), summed over the K."""
        return Categorical(self.log_probs).log_prob(sample).sum(-1)

    def entropy(self) -> Tensor:
        """(N,), summed over the K."""
        return Categorical(self.log_probs).entropy().sum(-1)

    def kl(self, other: MultiDiscrete) -> Tensor:
        """(N,), summed over the K."""
        return Categorical(self.log_probs).kl(Categorical(other.log_probs)).sum(-1)

    def to_action(self, sample: Tensor) -> Tensor:
        """The sample."""
        return sample

    def from_action(self, action: Tensor) -> Tensor:
        """The action."""
        return action


def _lowest(logits: Tensor) -> float:
    """The logit of what must not happen: finite, so that no 0 is multiplied by an infinity, and far from overflow."""
    return torch.finfo(logits.dtype).min / 2


def _mask(logits: Tensor, mask: Tensor | None) -> Tensor:
    return logits if mask is None else logits.masked_fill(~mask, _lowest(logits))


def _log_softmax(logits: Tensor) -> Tensor:
    """Over the last dimension; as the first of all where it is short: torch is up to six times as fast along that."""
    if logits.shape[-1] < _FEW_ACTIONS:
        return logits.transpose(0, -1).log_softmax(0).transpose(0, -1)
    return logits.log_softmax(-1)
