"""What agents minimize that learn the values of actions from sequences.

Shapes: T steps in time, B sequences, F features of an observation, C numbers of a carry, A actions.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from rein.networks.recurrent_q import RecurrentQNetwork
from rein.ops.losses import huber
from rein.ops.statistics import masked_mean


class SequenceBatch(NamedTuple):
    """Sequences that are learned from, each within one episode."""

    features: Tensor  # (T, B, F) what the encoder made of the observations
    carry: Tensor  # (B, C) what was remembered before the first of them
    action: Tensor  # (T, B) int64, counted from 0
    target: Tensor  # (T, B) of the value of the action
    valid: Tensor  # (T, B) bool

    @property
    def value(self) -> Tensor:
        """(T, B) one number for each row."""
        return self.target

    @property
    def size(self) -> int:
        """How many sequences there are."""
        return self.target.shape[1]

    def rows(self, index: Any) -> SequenceBatch:
        """Some of the sequences: a slice or a tensor of their numbers."""
        features, carry, *others = self
        return SequenceBatch(features[:, index], carry[index], *(column[:, index] for column in others))


def sequence_td_loss(
    networks: RecurrentQNetwork, batch: SequenceBatch, delta: float | None, *, report: bool = True
) -> tuple[Tensor, dict[str, Tensor]]:
    """The mean of `td_loss` of `rein.learning.value_loss` over valid steps, and `td_error` (B,) of each sequence."""
    value_TBA = networks.sequence(batch.features, batch.carry)
    value_TB = value_TBA.gather(2, batch.action.unsqueeze(2)).squeeze(2)
    error_TB = value_TB - batch.target
    loss_TB = huber(error_TB, delta)
    loss = masked_mean(loss_TB, batch.valid)
    size_TB = torch.where(batch.valid, error_TB.detach().abs(), 0.0)
    metrics = {"td_error": size_TB.sum(0) / batch.valid.sum(0).clamp(min=1)}
    if report:
        metrics |= {"value_loss": loss.detach(), "action_value": masked_mean(value_TB.detach(), batch.valid)}
    return loss, metrics
