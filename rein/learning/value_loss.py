"""What agents minimize that learn the values of actions.

Shapes: M rows of a minibatch, F features of an observation.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from rein.networks.q_network import QNetwork
from rein.ops.statistics import masked_mean


class Batch(NamedTuple):
    """Rows that are learned from."""

    features: Tensor  # (M, F) what the encoder made of the observations
    action: Tensor  # (M,) int64, counted from 0
    value: Tensor  # (M,) of the best action, when the observation was seen
    target: Tensor  # (M,) of the value of the action
    valid: Tensor | None  # (M,) bool; None for all

    @property
    def size(self) -> int:
        """How many rows there are."""
        return len(self.value)

    def rows(self, index: Any) -> Batch:
        """Some of the rows: a slice or a tensor of their numbers."""
        take = (
            (lambda column: column[index]) if isinstance(index, slice) else lambda column: column.index_select(0, index)
        )
        return Batch(*(None if column is None else take(column) for column in self))  # type: ignore[arg-type]


def squared_error(
    networks: QNetwork, batch: Batch, coefficients: None, *, report: bool = True
) -> tuple[Tensor, dict[str, Tensor]]:
    """Half the mean squared error of the values of the actions that were taken, and, to `report`, what they are."""
    value_M = networks(batch.features).gather(1, batch.action.unsqueeze(1)).squeeze(1)
    loss = masked_mean((value_M - batch.target).square(), batch.valid) * 0.5
    if not report:
        return loss, {}
    return loss, {"value_loss": loss.detach(), "action_value": masked_mean(value_M.detach(), batch.valid)}
