"""What policy-gradient agents minimize.

Shapes: M rows of a minibatch, F features of an observation.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from rein.networks.actor_critic import ActorCritic
from rein.ops.losses import clipped_surrogate, clipped_value_loss
from rein.ops.statistics import masked_mean


class Batch(NamedTuple):
    """Rows that are learned from."""

    features: Tensor  # (M, F)
    sample: Tensor  # (M, ...) what the distribution was asked for
    log_prob: Tensor  # (M,) of the sample, when it was drawn
    value: Tensor  # (M,) of the observation, when it was seen
    advantage: Tensor  # (M,)
    target: Tensor  # (M,) of the value
    valid: Tensor | None  # (M,) bool; None for all

    def rows(self, index: Any) -> Batch:
        """Some of the rows."""
        return Batch(*(None if column is None else column[index] for column in self))  # type: ignore[arg-type]


class Coefficients(NamedTuple):
    """What weighs the parts of the loss."""

    clip: float
    value: float
    entropy: float
    value_clip: float | None


def policy_loss(networks: ActorCritic, batch: Batch, coefficients: Coefficients) -> tuple[Tensor, dict[str, Tensor]]:
    """Surrogate, value and entropy in one number, and what is worth knowing of them. Without side effects.

        loss = surrogate + c_value * value loss - c_entropy * entropy

    Source: Schulman et al. 2017, equation 9.
    """
    distribution, value_M = networks(batch.features)
    valid_M, clip = batch.valid, coefficients.value_clip
    surrogate = clipped_surrogate(
        distribution.log_prob(batch.sample), batch.log_prob, batch.advantage, coefficients.clip
    )
    if clip is None:
        value_loss_M = 0.5 * (value_M - batch.target).square()
    else:
        value_loss_M = clipped_value_loss(value_M, batch.value, batch.target, clip)
    surrogate_loss, value_loss = masked_mean(surrogate.loss, valid_M), masked_mean(value_loss_M, valid_M)
    entropy = masked_mean(distribution.entropy(), valid_M)
    loss = surrogate_loss + coefficients.value * value_loss - coefficients.entropy * entropy
    metrics = {
        "policy_loss": surrogate_loss.detach(),
        "value_loss": value_loss.detach(),
        "entropy": entropy.detach(),
        "approx_kl": masked_mean(surrogate.approx_kl, valid_M),
        "clip_fraction": masked_mean(surrogate.clipped, valid_M),
        "ratio": masked_mean(surrogate.ratio, valid_M),
    }
    return loss, metrics
