"""What critics and actors of continuous actions minimize.

Shapes: K critics, B rows, F features of an observation, A numbers of an action.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from rein.learning.rows import take_rows
from rein.networks.continuous import Actor, Critics


class CriticBatch(NamedTuple):
    """Rows that critics learn from."""

    features: Tensor  # (B, F)
    action: Tensor  # (B, A) from -1 to 1, or (B,) int64 counted from 0
    target: Tensor  # (B,)
    weight: Tensor | None  # (B,) of each row; None for all alike

    valid = None  # all of them

    @property
    def value(self) -> Tensor:
        """Of the shape of the values."""
        return self.target

    @property
    def size(self) -> int:
        """How many rows there are."""
        return len(self.target)

    rows = take_rows


class ActorBatch(NamedTuple):
    """Rows that an actor learns from."""

    features: Tensor  # (B, F)
    noise: Tensor  # (B, A) standard normal, which its samples are made of

    valid = None

    @property
    def value(self) -> Tensor:
        """A number for each row."""
        return self.noise[:, 0]

    @property
    def size(self) -> int:
        """How many rows there are."""
        return len(self.noise)

    rows = take_rows


def critic_loss(
    critics: Critics, batch: CriticBatch, coefficients: None, *, report: bool = True
) -> tuple[Tensor, dict[str, Tensor]]:
    """Half the mean squared error of each critic, summed; the mean absolute errors of the rows as `td_error` (B,)."""
    return squared_errors(critics(batch.features, batch.action), batch, report)


def squared_errors(value_KB: Tensor, batch: CriticBatch, report: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and the metrics of `critic_loss`, from the values of the actions that were taken."""
    error_KB = value_KB - batch.target
    square_KB = error_KB.square()
    loss = (square_KB if batch.weight is None else square_KB * batch.weight).sum() * (0.5 / batch.size)
    with torch.no_grad():
        metrics = {"td_error": error_KB.abs().mean(0)}
        if report:
            metrics |= {"critic_loss": loss.detach(), "action_value": value_KB.mean()}
    return loss, metrics


def soft_actor_loss(
    actor: Actor, batch: ActorBatch, coefficients: Any, *, report: bool = True
) -> tuple[Tensor, dict[str, Tensor]]:
    """mean(alpha * log pi(a | s) - min_k Q_k(s, a)) for samples a; and the log-probabilities of these, (B,).

    Source: Haarnoja et al. 2018 ("Soft actor-critic algorithms and applications"), equation 7.
    """
    critics, temperature = coefficients
    distribution = actor.distribution(batch.features)
    sample = distribution.sample_from(batch.noise)
    log_prob_B = distribution.log_prob(sample)
    value_B = critics.frozen(batch.features, sample.tanh()).amin(0)
    loss = (temperature * log_prob_B - value_B).mean()
    metrics = {"log_prob": log_prob_B.detach()}
    if report:
        metrics |= {"actor_loss": loss.detach(), "entropy": -log_prob_B.detach().mean()}
    return loss, metrics


def deterministic_actor_loss(
    actor: Actor, batch: ActorBatch, coefficients: Any, *, report: bool = True
) -> tuple[Tensor, dict[str, Tensor]]:
    """-mean Q_1(s, mu(s)).

    Sources: Silver et al. 2014, equation 9; Lillicrap et al. 2016, equation 6.
    """
    (critics,) = coefficients
    loss = -critics.frozen(batch.features, actor.action(batch.features), 1).mean()
    return loss, {"actor_loss": loss.detach()} if report else {}
