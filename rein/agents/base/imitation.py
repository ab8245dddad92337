"""What agents minimize that learn to do what was done, all of it or what was done well.

Shapes: B rows, F features of an observation, A numbers of an action.
"""

from __future__ import annotations

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from rein.agents.base.critic_loss import take_rows
from rein.networks.continuous import Actor, StateValue
from rein.ops.losses import expectile

WITHIN = 0.999  # the largest action whose density is asked for: of what is nearer to the bound, u has no bound itself
LEAST_LOG_STD = -5.0  # that a likelihood asks for: data of a policy without chance would have it fall for ever


class ImitationBatch(NamedTuple):
    """Rows of which an actor learns the actions."""

    features: Tensor  # (B, F)
    action: Tensor  # (B, A) from -1 to 1, or (B,) int64 counted from 0
    weight: Tensor | None  # (B,) how much each of them is to be imitated; None for all alike

    valid = None  # all of them

    @property
    def value(self) -> Tensor:
        """A number for each row."""
        return self.action if self.action.ndim == 1 else self.action[:, 0]

    @property
    def size(self) -> int:
        """How many rows there are."""
        return len(self.action)

    rows = take_rows


class ValueBatch(NamedTuple):
    """Rows that the value of a state is learned from."""

    features: Tensor  # (B, F)
    target: Tensor  # (B,)
    weight: Tensor | None = None  # (B,) of each row; None for all alike

    valid = None

    @property
    def value(self) -> Tensor:
        """Of the shape of the values."""
        return self.target

    @property
    def size(self) -> int:
        """How many rows there are."""
        return len(self.target)

    rows = take_rows


def likelihood_loss(
    actor: Actor, batch: ImitationBatch, coefficients: None, *, report: bool = True
) -> tuple[Tensor, dict[str, Tensor]]:
    """mean -w log pi(a | s) of a squashed Gaussian; |tanh(mean) - a|^2 of the rows as `error` (B,).

    A recorded action may lie on its bound, where the density of a squashed Gaussian has no limit: it is taken to be a
    thousandth from it. The error is that of `squared_action_loss`, of the middle of the distribution: -log pi is that
    of a density, below 0 where an action is known well, so its size would be large for the rows that are learned best.

    Sources: Pomerleau 1988 for w = 1; Peters & Schaal 2007, Nair et al. 2020 (AWAC), equation 13, for others.
    """
    distribution = actor.distribution(batch.features)
    distribution = distribution._replace(log_std=distribution.log_std.clamp(min=LEAST_LOG_STD))
    loss_B = -distribution.log_prob(batch.action.clamp(-WITHIN, WITHIN).atanh())
    error_B = (distribution.mean.detach().tanh() - batch.action).square().sum(1)
    return _weighed(loss_B, error_B, batch.weight, report)


def squared_action_loss(
    actor: Actor, batch: ImitationBatch, coefficients: None, *, report: bool = True
) -> tuple[Tensor, dict[str, Tensor]]:
    """mean w |mu(s) - a|^2 of an actor without chance; the squares of the rows as `error` (B,)."""
    error_B = (actor.action(batch.features) - batch.action).square().sum(1)
    return _weighed(error_B, error_B, batch.weight, report)


def cross_entropy_loss(
    networks: nn.Module, batch: ImitationBatch, coefficients: None, *, report: bool = True
) -> tuple[Tensor, dict[str, Tensor]]:
    """mean -w log pi(a | s) of Discrete actions, whose logits the networks give; the -log pi as `error` (B,)."""
    error_B = F.cross_entropy(networks(batch.features), batch.action, reduction="none")
    return _weighed(error_B, error_B, batch.weight, report)


def expectile_loss(
    value: StateValue, batch: ValueBatch, tau: float | Tensor, *, report: bool = True
) -> tuple[Tensor, dict[str, Tensor]]:
    """mean w |tau - [e < 0]| e^2 of e = y - V(s): what an action is worth that is among the better ones of the data.

    Source: Kostrikov et al. 2022 (IQL), equation 5.
    """
    value_B = value(batch.features)
    loss_B = expectile(batch.target - value_B, tau)  # type: ignore[arg-type]  # where it is compiled, a tensor
    loss = (loss_B if batch.weight is None else loss_B * batch.weight).mean()
    return loss, {"value_loss": loss.detach(), "value": value_B.detach().mean()} if report else {}


def _weighed(
    loss_B: Tensor, error_B: Tensor, weight_B: Tensor | None, report: bool
) -> tuple[Tensor, dict[str, Tensor]]:
    loss = (loss_B if weight_B is None else loss_B * weight_B).mean()
    metrics = {"error": error_B.detach()}
    return loss, metrics | {"actor_loss": loss.detach()} if report else metrics
