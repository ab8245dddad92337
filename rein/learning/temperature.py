"""What entropy is worth to an agent that wants some of it.

Shapes: B rows of a batch.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rein.learning.rows import take_rows


class Temperature(nn.Module):
    """alpha, by its logarithm."""

    def __init__(self, initial: float, device: torch.device) -> None:
        super().__init__()
        self.log = nn.Parameter(torch.tensor(math.log(initial), dtype=torch.float32, device=device))


class TemperatureBatch(NamedTuple):
    """Rows that the temperature learns from."""

    log_prob: Tensor  # (B,) of what the actor would do

    valid = None

    @property
    def value(self) -> Tensor:
        """A number for each row."""
        return self.log_prob

    @property
    def size(self) -> int:
        """How many rows there are."""
        return len(self.log_prob)

    rows = take_rows


def check_learned(agent: object, temperature: float | None, learning_rate: Any) -> None:
    """ValueError for the learning rate of a temperature that is fixed."""
    if temperature is not None and learning_rate is not None:
        raise ValueError(
            f"{type(agent).__name__}(temperature={temperature:g}, temperature_learning_rate={learning_rate!r}): "
            "a fixed temperature is not learned; give one of the two"
        )


def temperature_loss(
    temperature: Temperature, batch: TemperatureBatch, target_entropy: float, *, report: bool = True
) -> tuple[Tensor, dict[str, Tensor]]:
    """mean -log alpha * (log pi + target_entropy): alpha rises while there is less entropy than wanted.

    Source: Haarnoja et al. 2018 ("Soft actor-critic algorithms and applications"), equation 18, in log alpha.
    """
    return -temperature.log * (batch.log_prob.mean() + target_entropy), {}


@torch.no_grad()
def temperature_gradient(
    temperature: Temperature,
    batch: TemperatureBatch,
    target_entropy: float,
    share: float | Tensor | None,
    *,
    report: bool,
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """What autograd makes of `share` times `temperature_loss`."""
    return [(batch.log_prob.mean() + target_entropy) * (-1.0 if share is None else -share)], {}
