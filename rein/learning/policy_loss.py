"""What policy-gradient agents minimize.

Shapes: M rows of a minibatch, F features of an observation; in sequences T steps, N environments, C numbers of a carry.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from rein.networks.actor_critic import ActorCritic
from rein.ops.losses import clipped_surrogate, clipped_value_loss
from rein.ops.statistics import masked_mean

METRICS = ("policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction", "ratio")


class Batch(NamedTuple):
    """Rows that are learned from, (M, ...); or whole sequences of them, (T, N, ...), for recurrent networks."""

    features: Tensor  # (M, F) what the encoder made of the observations
    sample: Tensor  # (M, ...) what the distribution was asked for
    log_prob: Tensor  # (M,) of the sample, when it was drawn
    value: Tensor  # (M,) of the observation, when it was seen
    advantage: Tensor  # (M,)
    target: Tensor  # (M,) of the value
    valid: Tensor | None = None  # (M,) bool; None for all
    reset: Tensor | None = None  # (T, N) bool, of sequences: whether the carry is zero before this step
    carry: Tensor | None = None  # (N, C), of sequences: before the first step

    @property
    def size(self) -> int:
        """How many rows, or sequences, there are to choose from."""
        return len(self.value) if self.reset is None else self.value.shape[1]

    def rows(self, index: Any) -> Batch:
        """Some of the rows, or of the sequences."""
        if self.reset is None:
            take = Tensor.__getitem__ if isinstance(index, slice) else _select  # three times as fast as indexing
            return Batch(*(None if column is None else take(column, index) for column in self))  # type: ignore[arg-type]
        chosen = (None if column is None else column[:, index] for column in self[:-1])
        return Batch(*chosen, self.carry[index])  # type: ignore[arg-type, index]


class Coefficients(NamedTuple):
    """What weighs the parts of the loss."""

    clip: float | Tensor | None  # of the ratio; None for the plain policy gradient
    value: float
    entropy: float | Tensor
    value_clip: float | None = None


def policy_loss(networks: ActorCritic, batch: Batch, coefficients: Coefficients) -> tuple[Tensor, dict[str, Tensor]]:
    """Surrogate, value and entropy in one number, and what is worth knowing of them. Without side effects.

        loss = surrogate + c_value * value loss - c_entropy * entropy

    The surrogate is the clipped one, or without a clip -A log pi, whose gradient is the policy's (Sutton et al. 2000).

    Source: Schulman et al. 2017, equation 9.
    """
    distribution, value_M = networks.look(batch.features, batch.carry, batch.reset)
    log_prob_M = distribution.log_prob(batch.sample)
    clip, weight = coefficients.clip, coefficients.entropy
    surrogate = clipped_surrogate(log_prob_M, batch.log_prob, batch.advantage, 0.0 if clip is None else clip)
    surrogate_M = surrogate.loss if clip is not None else -batch.advantage * log_prob_M
    if coefficients.value_clip is None:
        value_loss_M = 0.5 * (value_M - batch.target).square()
    else:
        value_loss_M = clipped_value_loss(value_M, batch.value, batch.target, coefficients.value_clip)
    learns_entropy = isinstance(weight, Tensor) or weight != 0.0
    with torch.set_grad_enabled(learns_entropy and torch.is_grad_enabled()):
        entropy_M = distribution.entropy()
    loss_M = torch.add(surrogate_M, value_loss_M, alpha=coefficients.value)
    loss_M = loss_M - weight * entropy_M if learns_entropy else loss_M
    with torch.no_grad():  # all means in one operation
        rows = (surrogate_M, value_loss_M, entropy_M, surrogate.approx_kl, surrogate.clipped, surrogate.ratio)
        means = _means(torch.stack([row.float() for row in rows]), batch.valid)
    return masked_mean(loss_M, batch.valid), dict(zip(METRICS, means.unbind(), strict=True))


def _select(column: Tensor, index_M: Tensor) -> Tensor:
    return column.index_select(0, index_M)


def _means(x_KM: Tensor, valid_M: Tensor | None) -> Tensor:
    """`masked_mean` of each of K rows of numbers, (K,)."""
    if valid_M is None:
        return x_KM.flatten(1).mean(1)
    return torch.where(valid_M, x_KM, 0.0).flatten(1).sum(1) / valid_M.sum().clamp(min=1)
