"""Losses of critics and of the temperature, shared by several agents.

Shapes: K critics, B rows.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from rein.agents.base.learner import Batch
from rein.networks.actor_critic import Critics


def critic_loss(
    critics: Critics, batch: Batch, coefficients: None, *, report: bool = True
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute half the mean squared error, summed over critics; reports mean absolute errors as `td_error` (B,)."""
    return squared_errors(critics(batch.features, batch.action), batch, report)


def squared_errors(value_KB: Tensor, batch: Batch, report: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute `critic_loss` from the values of the recorded actions."""
    error_KB = value_KB - batch.target
    square_KB = error_KB.square()
    loss = (square_KB if batch.weight is None else square_KB * batch.weight).sum() * (0.5 / batch.size)
    with torch.no_grad():
        metrics = {"td_error": error_KB.abs().mean(0)}
        if report:
            metrics |= {"critic_loss": loss.detach(), "action_value": value_KB.mean()}
    return loss, metrics


class Temperature(nn.Module):
    """Weight alpha of the entropy, as its logarithm."""

    def __init__(self, initial: float, device: torch.device) -> None:
        super().__init__()
        self.log = nn.Parameter(torch.full((), math.log(initial), dtype=torch.float32, device=device))


def check_learned(agent: object, temperature: float | None, learning_rate: Any) -> None:
    """Raise ValueError for a learning rate of a fixed temperature."""
    if temperature is not None and learning_rate is not None:
        raise ValueError(
            f"{type(agent).__name__}(temperature={temperature:g}, temperature_learning_rate={learning_rate!r}): "
            "a fixed temperature is not learned; give one of the two"
        )


def temperature_loss(
    temperature: Temperature, batch: Batch, target_entropy: float, *, report: bool = True
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute mean -log alpha * (log pi + target_entropy): alpha rises while the entropy is below its target.

    Source: Haarnoja et al. 2018 ("Soft actor-critic algorithms and applications"), equation 18, in log alpha.
    """
    return -temperature.log * (batch.log_prob.mean() + target_entropy), {}
