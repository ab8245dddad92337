"""The gradient of `policy_loss`, written out: of multilayer perceptrons with small batches autograd is half the cost.

Shapes: M rows of a minibatch, K networks, H features, A numbers that a head puts out.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from rein.learning.policy_loss import Batch, Coefficients, report_metrics
from rein.networks.actor_critic import ActorCritic
from rein.networks.heads import ContinuousHead, DiscreteHead
from rein.ops.distributions import Categorical, Normal, SquashedNormal
from rein.ops.losses import clipped_surrogate_slope
from rein.ops.scores import categorical_score, normal_score
from rein.ops.stack import FUSED, stack_backward, stack_forward


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
