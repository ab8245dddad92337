"""What agents minimize that learn the quantiles of returns.

Shapes: B rows, F features of an observation, Q levels, S samples of a target.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from rein.learning.rows import take_rows
from rein.networks.quantile_network import QuantileNetwork
from rein.ops.losses import quantile_huber


class QuantileBatch(NamedTuple):
    """Rows that quantiles are learned from."""

    features: Tensor  # (B, F) what the encoder made of the observations
    action: Tensor  # (B,) int64, counted from 0
    level: Tensor  # (B, Q) at which quantiles are learned
    target: Tensor  # (B, S) samples of the return
    weight: Tensor | None  # (B,) of each row; None for all alike

    valid = None  # all of them

    @property
    def value(self) -> Tensor:
        """A number for each row."""
        return self.target[:, 0]

    @property
    def size(self) -> int:
        """How many rows there are."""
        return len(self.target)

    rows = take_rows


def quantile_loss(
    networks: QuantileNetwork, batch: QuantileBatch, kappa: float, *, report: bool = True
) -> tuple[Tensor, dict[str, Tensor]]:
    """The mean of `rein.ops.losses.quantile_huber` over rows; their mean absolute errors as `td_error` (B,).

    Source: Dabney et al. 2018 (IQN), equation 3.
    """
    quantile_BQA = networks.quantiles(batch.features, batch.level)
    action_BQ1 = batch.action.view(-1, 1, 1).expand(-1, quantile_BQA.shape[1], -1)
    quantile_BQ = quantile_BQA.gather(2, action_BQ1).squeeze(2)
    loss_B = quantile_huber(quantile_BQ, batch.level, batch.target, kappa)
    loss = (loss_B if batch.weight is None else loss_B * batch.weight).mean()
    quantile_BQ = quantile_BQ.detach()
    metrics = {"td_error": (batch.target.unsqueeze(1) - quantile_BQ.unsqueeze(2)).abs().mean((1, 2))}
    if report:
        metrics |= {"value_loss": loss.detach(), "action_value": quantile_BQ.mean()}
    return loss, metrics
