"""Policy-gradient loss and its gradient in closed form.

Shapes: M rows of a minibatch, F features; in sequences T steps, N environments, C features of a carry.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rein.networks.actor_critic import ActorCritic
from rein.networks.heads import ContinuousHead, DiscreteHead
from rein.ops.distributions import Categorical, Distribution, Normal, SquashedNormal
from rein.ops.distributions.scores import categorical_score, normal_score
from rein.ops.losses import clipped_surrogate, clipped_surrogate_slope, clipped_value_loss
from rein.ops.stack import FUSED, stack_backward, stack_forward
from rein.ops.statistics import masked_mean

METRICS = ("policy_loss", "value_loss", "entropy", "ratio", "approx_kl", "clip_fraction")


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
            return Batch(*(None if column is None else take(column, index) for column in self))  # type: ignore[arg-type]  # columns in their order, None for none
        chosen = (None if column is None else column[:, index] for column in self[:-1])
        return Batch(*chosen, self.carry[index])  # type: ignore[arg-type, index]  # columns in their order, None for none


class Coefficients(NamedTuple):
    """What weighs the parts of the loss."""

    clip: float | Tensor | None  # of the ratio; None for the plain policy gradient
    value: float | Tensor
    entropy: float | Tensor
    value_clip: float | Tensor | None = None


def policy_loss(
    networks: ActorCritic, batch: Batch, coefficients: Coefficients, *, report: bool = True
) -> tuple[Tensor, dict[str, Tensor]]:
    """Surrogate, value and entropy in one number, and, to `report`, what is worth knowing of them. No side effects.

        loss = surrogate + c_value * value loss - c_entropy * entropy

    The surrogate is the clipped one, or without a clip -A log pi, whose gradient is the policy's (Sutton et al. 2000).

    Source: Schulman et al. 2017, equation 9.
    """
    distribution, value_M = networks.look(batch.features, batch.carry, batch.reset)
    log_prob_M = distribution.log_prob(batch.sample)
    surrogate_M, value_loss_M = _surrogate(log_prob_M, batch, coefficients), _value_loss(value_M, batch, coefficients)
    if isinstance(coefficients.value, Tensor):  # which as alpha would have to be read by the host
        loss_M = torch.addcmul(surrogate_M, value_loss_M, coefficients.value)
    else:
        loss_M = torch.add(surrogate_M, value_loss_M, alpha=coefficients.value)
    if isinstance(coefficients.entropy, Tensor) or coefficients.entropy != 0.0:
        loss_M = loss_M - coefficients.entropy * distribution.entropy()
    metrics = report_metrics(distribution, log_prob_M, value_M, batch, coefficients) if report else {}
    return masked_mean(loss_M, batch.valid), metrics


@torch.no_grad()
def report_metrics(
    distribution: Distribution, log_prob_M: Tensor, value_M: Tensor, batch: Batch, coefficients: Coefficients
) -> dict[str, Tensor]:
    """The parts of the loss and how far the policy has moved, each a mean over the rows that count."""
    clip = math.inf if coefficients.clip is None else coefficients.clip  # without one nothing is clipped
    moved = clipped_surrogate(log_prob_M, batch.log_prob, batch.advantage, clip)
    losses = _surrogate(log_prob_M, batch, coefficients), _value_loss(value_M, batch, coefficients)
    rows = (*losses, distribution.entropy(), moved.ratio, moved.approx_kl, moved.clipped)
    stacked_KM = torch.stack([row.float() for row in rows])  # for one mean instead of six
    return dict(zip(METRICS, _means(stacked_KM, batch.valid).unbind(), strict=True))


def _surrogate(log_prob_M: Tensor, batch: Batch, coefficients: Coefficients) -> Tensor:
    if coefficients.clip is None:
        return -batch.advantage * log_prob_M
    return clipped_surrogate(log_prob_M, batch.log_prob, batch.advantage, coefficients.clip).loss


def _value_loss(value_M: Tensor, batch: Batch, coefficients: Coefficients) -> Tensor:
    if coefficients.value_clip is None:
        return (value_M - batch.target).square().mul(0.5)
    return clipped_value_loss(value_M, batch.value, batch.target, coefficients.value_clip)


def _select(column: Tensor, index_M: Tensor) -> Tensor:
    return column.index_select(0, index_M)


def _means(x_KM: Tensor, valid_M: Tensor | None) -> Tensor:
    """`masked_mean` of each of K rows of numbers, (K,)."""
    if valid_M is None:
        return x_KM.flatten(1).mean(1)
    return torch.where(valid_M, x_KM, 0.0).flatten(1).sum(1) / valid_M.sum().clamp(min=1)


def has_closed_form(networks: ActorCritic) -> bool:
    """Whether `closed_form_gradient` knows these networks: perceptrons alone, and a head of one simple distribution."""
    head, hidden = networks.policy_head, networks.hidden
    known = head.single if isinstance(head, DiscreteHead) else head.squash != "ball" and not head.state_dependent_std
    plain = networks.stem is None and not networks.cores and len(hidden.layers) > 0
    return plain and hidden.activation in FUSED and known


def _covers(networks: ActorCritic, coefficients: Coefficients) -> bool:
    squashed = isinstance(networks.policy_head, ContinuousHead) and bool(networks.policy_head.squash)
    without_entropy = not isinstance(coefficients.entropy, Tensor) and coefficients.entropy == 0.0
    return coefficients.value_clip is None and (without_entropy or not squashed)


@torch.no_grad()
def closed_form_gradient(
    networks: ActorCritic, batch: Batch, coefficients: Coefficients, share: float | Tensor | None, *, report: bool
) -> tuple[list[Tensor], dict[str, Tensor]] | None:
    """What autograd makes of `share` times `policy_loss`, in the order of `networks.parameters()`; and its metrics.

    None where the coefficients are those of a loss that is not written out here.

    With w the weight of a row, 1 / M, and g the slope of the surrogate along log pi (`clipped_surrogate_slope`):

        d loss / d output = w (g d log pi / d output - c_entropy d H / d output)
        d loss / d value  = w c_value (value - target)

    and from there back through two linear heads and the hidden layers (Rumelhart, Hinton & Williams 1986).
    """
    if not _covers(networks, coefficients):
        return None
    top_KMH, way = stack_forward(batch.features, networks.hidden.layers, networks.hidden.activation)
    actor_MH, critic_MH = top_KMH[0], top_KMH[-1]
    head, value_head = networks.policy_head, networks.value_head
    output_MA = head.linear(actor_MH)
    value_M = F.linear(critic_MH, value_head.weight, value_head.bias).squeeze(-1)
    distribution = head.distribution(output_MA)
    log_prob_M = distribution.log_prob(batch.sample)

    weight = _weight(batch, share)
    if coefficients.clip is None:
        slope_M = -batch.advantage * weight
    else:
        slope_M = clipped_surrogate_slope(log_prob_M, batch.log_prob, batch.advantage, coefficients.clip).mul_(weight)
    entropy_weight_M = None
    if isinstance(coefficients.entropy, Tensor) or coefficients.entropy != 0.0:
        entropy_weight_M = (torch.ones_like(slope_M) * weight) * -coefficients.entropy
    of_output_MA, of_log_std = _score(distribution, batch.sample, slope_M, entropy_weight_M)
    of_value_M1 = (value_M - batch.target).mul_(weight * coefficients.value).unsqueeze(-1)

    of_top_KMH = torch.empty_like(top_KMH)
    torch.mm(of_output_MA, head.linear.weight, out=of_top_KMH[0])
    if len(of_top_KMH) == 1:
        of_top_KMH[0].addmm_(of_value_M1, value_head.weight)
    else:
        torch.mm(of_value_M1, value_head.weight, out=of_top_KMH[1])
    of_hidden, _ = stack_backward(of_top_KMH, way)
    gradients = [*of_hidden[::2], *of_hidden[1::2]]  # weights, then biases, as the module lists them
    gradients += of_log_std
    gradients += [of_output_MA.t() @ actor_MH, of_output_MA.sum(0), of_value_M1.t() @ critic_MH, of_value_M1.sum(0)]
    metrics = {}
    if report:
        metrics = report_metrics(distribution, log_prob_M, value_M, batch, coefficients)
        metrics = metrics if share is None else {name: value * share for name, value in metrics.items()}
    return gradients, metrics


def _weight(batch: Batch, share: float | Tensor | None) -> float | Tensor:
    """Of each row in the mean, a number or (M,)."""
    if batch.valid is None:
        weight = 1.0 / len(batch.value)
    else:
        weight = batch.valid.to(batch.value.dtype) / batch.valid.sum().clamp(min=1)
    return weight if share is None else weight * share


def _score(
    distribution: object, sample: Tensor, slope_M: Tensor, entropy_weight_M: Tensor | None
) -> tuple[Tensor, list[Tensor]]:
    """The gradient of what the head puts out, (M, A), and of its free parameters."""
    if isinstance(distribution, Categorical):
        return categorical_score(distribution.log_probs, sample.long(), slope_M, entropy_weight_M), []
    if isinstance(distribution, Normal | SquashedNormal):  # squashing adds what depends on the sample alone
        settings = distribution.mean, distribution.log_std, sample, slope_M, entropy_weight_M
        of_mean_MA, of_log_std_MA = normal_score(*settings)
        return of_mean_MA, [of_log_std_MA.sum(0)]
    raise TypeError(f"{type(distribution).__name__} has no closed form here")
