"""What agents minimize that learn the values of actions.

Shapes: M rows of a minibatch, F features of an observation.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rein.networks.mlp import Stack
from rein.networks.q_network import QNetwork
from rein.ops.losses import huber
from rein.ops.stack import FUSED, stack_backward, stack_forward
from rein.ops.statistics import masked_mean


class Batch(NamedTuple):
    """Rows that are learned from."""

    features: Tensor  # (M, F) what the encoder made of the observations
    action: Tensor  # (M,) int64, counted from 0
    value: Tensor  # (M,) of the best action, when the observation was seen
    target: Tensor  # (M,) of the value of the action
    valid: Tensor | None  # (M,) bool; None for all
    weight: Tensor | None = None  # (M,) of each row in `td_loss`; None for all alike

    @property
    def size(self) -> int:
        """How many rows there are."""
        return len(self.value)

    def rows(self, index: Any) -> Batch:
        """Some of the rows: a slice or a tensor of their numbers."""
        take = (
            (lambda column: column[index]) if isinstance(index, slice) else lambda column: column.index_select(0, index)
        )
        return Batch(*(None if column is None else take(column) for column in self))  # type: ignore[arg-type]  # columns in their order, None for none


def squared_error(
    networks: QNetwork, batch: Batch, coefficients: None, *, report: bool = True
) -> tuple[Tensor, dict[str, Tensor]]:
    """Half the mean squared error of the values of the actions that were taken, and, to `report`, what they are."""
    value_M = networks(batch.features).gather(1, batch.action.unsqueeze(1)).squeeze(1)
    loss = masked_mean((value_M - batch.target).square(), batch.valid) * 0.5
    if not report:
        return loss, {}
    return loss, {"value_loss": loss.detach(), "action_value": masked_mean(value_M.detach(), batch.valid)}


def td_loss(
    networks: QNetwork, batch: Batch, delta: float | None, *, report: bool = True
) -> tuple[Tensor, dict[str, Tensor]]:
    """The mean Huber loss, or for no `delta` half the mean square, of temporal differences; these as `td_error` (M,).

    Source: Mnih et al. 2015, whose clipping of the error to [-1, 1] is a delta of 1.
    """
    value_M = networks(batch.features).gather(1, batch.action.unsqueeze(1)).squeeze(1)
    error_M = value_M - batch.target
    loss_M = huber(error_M, delta)
    loss = (loss_M if batch.weight is None else loss_M * batch.weight).mean()
    metrics = {"td_error": error_M.detach().abs()}
    if report:
        metrics |= {"value_loss": loss.detach(), "action_value": value_M.detach().mean()}
    return loss, metrics


@torch.no_grad()
def td_gradient(
    networks: QNetwork, batch: Batch, delta: float | None, share: float | Tensor | None, *, report: bool
) -> tuple[list[Tensor], dict[str, Tensor]] | None:
    """What autograd makes of `share` times `td_loss`, for perceptrons with a linear head; None for others.

    d loss / d Q(s, a) = w clamp(Q(s, a) - y, -delta, delta) / M for the action that was taken, and from there.
    """
    hidden, head = networks.hidden, networks.head
    if not isinstance(hidden, Stack) or not isinstance(head, nn.Linear):
        return None
    top_1MH, way = stack_forward(batch.features, hidden.layers, hidden.activation)
    action_M1 = batch.action.unsqueeze(1)
    value_MA = F.linear(top_1MH[0], head.weight, head.bias)
    error_M1 = value_MA.gather(1, action_M1) - batch.target.unsqueeze(1)
    scale = (1.0 / batch.size) * (1.0 if share is None else share)
    slope_M1 = (error_M1 if delta is None else error_M1.clamp(-delta, delta)) * scale
    if batch.weight is not None:
        slope_M1 *= batch.weight.unsqueeze(1)
    of_value_MA = torch.zeros_like(value_MA).scatter_(1, action_M1, slope_M1)
    of_hidden, _ = stack_backward((of_value_MA @ head.weight).unsqueeze(0), way)
    metrics = {"td_error": error_M1.abs().squeeze(1)}
    if report:
        loss_M1 = huber(error_M1, delta) * scale
        loss_M1 = loss_M1 if batch.weight is None else loss_M1 * batch.weight.unsqueeze(1)
        metrics |= {"value_loss": loss_M1.sum(), "action_value": value_MA.gather(1, action_M1).sum() * scale}
    of_head = [of_value_MA.t() @ top_1MH[0], of_value_MA.sum(0)]
    return [*of_hidden[::2], *of_hidden[1::2], *of_head], metrics


def has_closed_form(networks: QNetwork) -> bool:
    """Whether `td_gradient` knows these networks."""
    hidden = networks.hidden
    plain = isinstance(hidden, Stack) and len(hidden.layers) > 0 and hidden.activation in FUSED
    return plain and networks.stem is None and isinstance(networks.head, nn.Linear)
