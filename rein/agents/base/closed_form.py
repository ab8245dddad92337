"""Closed-form gradients of losses for multilayer perceptrons, which take less time than autograd.

Most of an update of small networks is the overhead of many small operations. A `Learner` uses these functions for the
default networks, and autograd otherwise; a reader of the algorithms can skip this module.

Shapes: K critics, M or B rows, F features of an observation, A outputs or dimensions of an action, H hidden features.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rein.agents.base.learner import Batch
from rein.agents.base.losses import Coefficients, Temperature, report_metrics
from rein.networks.actor_critic import LOG_STD, Actor, ActorCritic, Critics
from rein.networks.heads import ContinuousHead, DiscreteHead
from rein.networks.mlp import Stack
from rein.networks.q_networks import QNetwork
from rein.ops.distributions import Categorical, Normal, SquashedNormal
from rein.ops.losses import clipped_surrogate_slope, huber
from rein.ops.stack import FUSED, Pass, relu_backward, stack_backward, stack_forward

Found = tuple[list[Tensor], dict[str, Tensor]]


def has_closed_form(networks: nn.Module) -> bool:
    """Return whether networks consist of hidden layers and heads whose gradients are implemented here."""
    hidden = networks.hidden
    plain = (
        isinstance(hidden, Stack) and len(hidden.layers) > 0 and hidden.activation in FUSED and networks.encoder is None
    )
    if isinstance(networks, QNetwork):
        return plain and isinstance(networks.head, nn.Linear)
    if not isinstance(networks, ActorCritic):
        return plain
    head, plain = networks.policy_head, plain and not networks.cores
    if isinstance(head, DiscreteHead):
        return plain and head.single
    return plain and head.squash != "ball" and not head.state_dependent_std


def _covers(networks: ActorCritic, coefficients: Coefficients) -> bool:
    squashed = isinstance(networks.policy_head, ContinuousHead) and bool(networks.policy_head.squash)
    without_entropy = not isinstance(coefficients.entropy, Tensor) and coefficients.entropy == 0.0
    return coefficients.value_clip is None and (without_entropy or not squashed)


@torch.no_grad()
def policy_gradient(
    networks: ActorCritic, batch: Batch, coefficients: Coefficients, share: float | Tensor | None, *, report: bool
) -> Found | None:
    """Compute the gradient of `share` times `policy_loss`, in the order of `networks.parameters()`, and its metrics.

    Returns None if the coefficients belong to a loss that is not implemented here.

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

    weight = _row_weight(batch, share)
    if coefficients.clip is None:
        slope_M = -batch.advantage * weight
    else:
        slope_M = clipped_surrogate_slope(log_prob_M, batch.log_prob, batch.advantage, coefficients.clip).mul_(weight)
    entropy_weight_M = None
    if isinstance(coefficients.entropy, Tensor) or coefficients.entropy != 0.0:
        entropy_weight_M = (torch.ones_like(slope_M) * weight) * -coefficients.entropy
    of_output_MA, of_log_std = _policy_score(distribution, batch.sample, slope_M, entropy_weight_M)
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


def _row_weight(batch: Batch, share: float | Tensor | None) -> float | Tensor:
    """Return the weight of each row in the mean, a number or (M,)."""
    if batch.valid is None:
        weight = 1.0 / batch.size
    else:
        weight = batch.valid.to(batch.target.dtype) / batch.valid.sum().clamp(min=1)
    return weight if share is None else weight * share


def _policy_score(
    distribution: object, sample: Tensor, slope_M: Tensor, entropy_weight_M: Tensor | None
) -> tuple[Tensor, list[Tensor]]:
    """Return the gradient of the output of the head, (M, A), and those of its free parameters."""
    if isinstance(distribution, Categorical):
        return categorical_score(distribution.log_probs, sample.long(), slope_M, entropy_weight_M), []
    if isinstance(distribution, Normal | SquashedNormal):  # squashing adds what depends on the sample alone
        settings = distribution.mean, distribution.log_std, sample, slope_M, entropy_weight_M
        of_mean_MA, of_log_std_MA = normal_score(*settings)
        return of_mean_MA, [of_log_std_MA.sum(0)]
    raise TypeError(f"{type(distribution).__name__} has no closed form here")


def categorical_score(
    log_probs_NA: Tensor, sample_N: Tensor, weight_N: Tensor, entropy_weight_N: Tensor | None = None
) -> Tensor:
    """Compute the gradient of weighted log probabilities and entropies with respect to logits, (N, A).

    d log pi(a) / d logit_j = [j = a] - p_j      d H / d logit_j = -p_j (log p_j + H)
    """
    p_NA = log_probs_NA.exp()
    score_NA = p_NA * weight_N.neg().unsqueeze(-1)
    if entropy_weight_N is not None:
        negative_entropy_N1 = (p_NA * log_probs_NA).sum(-1, keepdim=True)
        score_NA -= p_NA * (log_probs_NA - negative_entropy_N1) * entropy_weight_N.unsqueeze(-1)
    return score_NA.scatter_add_(-1, sample_N.unsqueeze(-1), weight_N.unsqueeze(-1))


def normal_score(
    mean_NA: Tensor, log_std: Tensor, sample_NA: Tensor, weight_N: Tensor, entropy_weight_N: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute the gradient with respect to the mean and to the log standard deviation of each row, (N, A) each.

    z = (a - mean) / std      d log pi(a) / d mean = z / std      d log pi(a) / d log std = z^2 - 1      d H = 1
    """
    inverse_std = torch.exp(-log_std)
    z_NA = (sample_NA - mean_NA) * inverse_std
    weight_N1 = weight_N.unsqueeze(-1)
    of_log_std_NA = (z_NA.square() - 1.0) * weight_N1
    if entropy_weight_N is not None:
        of_log_std_NA += entropy_weight_N.unsqueeze(-1)
    return z_NA * inverse_std * weight_N1, of_log_std_NA


@torch.no_grad()
def td_gradient(
    networks: QNetwork, batch: Batch, delta: float | None, share: float | Tensor | None, *, report: bool
) -> Found | None:
    """Compute the gradient of `share` times `rein.agents.dqn.td_loss`. Returns None for heads that are not linear.

    d loss / d Q(s, a) = w clamp(Q(s, a) - y, -delta, delta) / M  for the recorded action
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


@torch.no_grad()
def critic_gradient(
    critics: Critics, batch: Batch, coefficients: None, share: float | Tensor | None, *, report: bool
) -> Found:
    """Compute the gradient of `share` times `critic_loss`: d loss / d Q_k(s, a) = w (Q_k(s, a) - y) / B.

    Source: Rumelhart, Hinton & Williams 1986.
    """
    value_KB, top_KBH, way = _forward(critics, batch.features, batch.action)
    error_KB = value_KB - batch.target
    slope_KB = error_KB * ((1.0 / batch.size) * (1.0 if share is None else share))
    if batch.weight is not None:
        slope_KB = slope_KB * batch.weight
    of_hidden, _ = stack_backward(slope_KB.unsqueeze(-1) * critics.weight, way)
    of_weight, of_bias = torch.bmm(slope_KB.unsqueeze(1), top_KBH), slope_KB.sum(1, keepdim=True)
    metrics = {"td_error": error_KB.abs().mean(0)}
    if report:
        loss = 0.5 * (slope_KB * error_KB).sum()
        metrics |= {"critic_loss": loss, "action_value": value_KB.mean() * (1.0 if share is None else share)}
    return [of_weight, of_bias, *of_hidden[::2], *of_hidden[1::2]], metrics


@torch.no_grad()
def soft_actor_gradient(
    actor: Actor, batch: Batch, coefficients: Any, share: float | Tensor | None, *, report: bool
) -> Found:
    """Compute the gradient of `share` times `rein.agents.sac.soft_actor_loss`.

    With u = mean + std * noise, a = tanh u, and m the critic with the smallest value, B times the gradient is

        d / d mean    = 2 alpha a - (1 - a^2) d Q_m / d a
        d / d log std = d / d mean * std * noise - alpha        and 0 if log std is at its bounds

    Source: the reparameterization of Haarnoja et al. 2018, equation 9.
    """
    critics, temperature = coefficients
    top_BH, way, output_BA = _act(actor, batch.features)
    mean, raw_log_std = output_BA.chunk(2, -1)
    log_std = raw_log_std.clamp(*LOG_STD)
    distribution = SquashedNormal(mean, log_std, -actor.bound, actor.bound)  # type: ignore[operator, arg-type]  # a buffer is a Tensor
    spread_BA = log_std.exp().mul_(batch.noise)
    sample_BA = mean + spread_BA
    action_BA = sample_BA.tanh()
    log_prob_B = distribution.log_prob(sample_BA)
    value_KB, _, critics_way = _forward(critics, batch.features, action_BA)
    value_B, chosen_B = value_KB.min(0)
    scale = (1.0 / batch.size) * (1.0 if share is None else share)
    of_action_BA = _of_action(critics, chosen_B, critics_way, batch.features.shape[1])
    of_mean = (2.0 * temperature) * action_BA - torch.addcmul(of_action_BA, of_action_BA, action_BA.square(), value=-1)
    of_log_std = torch.addcmul(-temperature, of_mean, spread_BA).masked_fill_(log_std != raw_log_std, 0.0)
    gradients = _back(actor, torch.cat((of_mean, of_log_std), 1).mul_(scale), top_BH, way)
    metrics = {"log_prob": log_prob_B}
    if report:
        loss = (temperature * log_prob_B - value_B).sum() * scale
        metrics |= {"actor_loss": loss, "entropy": -log_prob_B.sum() * scale}
    return gradients, metrics


@torch.no_grad()
def deterministic_actor_gradient(
    actor: Actor, batch: Batch, coefficients: Any, share: float | Tensor | None, *, report: bool
) -> Found:
    """Compute the gradient of `share` times `deterministic_actor_loss`: -(1 - a^2) d Q_1 / d a / B at a = tanh u."""
    (critics,) = coefficients
    top_BH, way, output_BA = _act(actor, batch.features)
    action_BA = output_BA.tanh()
    value_1B, _, critics_way = _forward(critics, batch.features, action_BA, 1)
    scale = (1.0 / batch.size) * (1.0 if share is None else share)
    of_action_BA = _of_action_by(critics, 0, critics_way, batch.features.shape[1])
    of_output_BA = torch.addcmul(of_action_BA, of_action_BA, action_BA.square(), value=-1.0).mul_(-scale)
    metrics = {"actor_loss": -value_1B.sum() * scale} if report else {}
    return _back(actor, of_output_BA, top_BH, way), metrics


def _forward(
    critics: Critics, x_BF: Tensor, action_BA: Tensor, members: int | None = None
) -> tuple[Tensor, Tensor, Pass]:
    """Return values (K, B) by the first `members`, the last hidden features, and the forward pass."""
    hidden = critics.hidden
    layers, weight_K1H, bias_K1 = hidden.layers, critics.weight, critics.bias
    if members is not None:
        layers = [parameter[:members] for parameter in layers]
        weight_K1H, bias_K1 = weight_K1H[:members], bias_K1[:members]
    top_KBH, way = stack_forward(torch.cat((x_BF, action_BA), 1), layers, hidden.activation)
    return torch.baddbmm(bias_K1.unsqueeze(-1), top_KBH, weight_K1H.mT).squeeze(-1), top_KBH, way


def _of_action(critics: Critics, chosen_B: Tensor, way: Pass, features: int) -> Tensor:
    """Return the gradient (B, A) of each row's chosen critic with respect to the action.

    On the CPU, each critic computes only its own rows. On devices, counting them would wait for the device.
    """
    if chosen_B.device.type != "cpu" or torch.compiler.is_compiling():
        of_value_KB = critics.weight.new_zeros(critics.members, len(chosen_B))
        of_top_KBH = of_value_KB.scatter_(0, chosen_B.unsqueeze(0), 1.0).unsqueeze(-1) * critics.weight
        _, of_input_KBI = stack_backward(of_top_KBH, way, of_input=True, of_parameters=False)
        return of_input_KBI[..., features:].sum(0)  # type: ignore[index]  # asked for
    of_action_BA = critics.weight.new_empty(len(chosen_B), way.weights[0].shape[1] - features)
    for k in range(critics.members):
        (row_R,) = (chosen_B == k).nonzero(as_tuple=True)
        of_action_BA.index_copy_(0, row_R, _of_action_by(critics, k, way, features, row_R))
    return of_action_BA


def _of_action_by(critics: Critics, k: int, way: Pass, features: int, row_R: Tensor | None = None) -> Tensor:
    """Return the gradient by critic k, for some rows or all."""
    kept = [layer[k] if row_R is None else layer[k].index_select(0, row_R) for layer in way.kept]
    slope = critics.weight[k].expand_as(kept[-1])
    derivative = relu_backward if way.activation == "relu" else torch.ops.aten.sigmoid_backward
    for layer in range(len(kept) - 1, -1, -1):
        weight_IH = way.weights[layer][k]
        slope = derivative(slope, kept[layer]) @ (weight_IH if layer else weight_IH[features:]).t()
    return slope if way.activation == "relu" else slope * 2.0


def _act(actor: Actor, x_BF: Tensor) -> tuple[Tensor, Pass, Tensor]:
    hidden = actor.hidden
    top_1BH, way = stack_forward(x_BF, hidden.layers, hidden.activation)
    return top_1BH[0], way, F.linear(top_1BH[0], actor.head.weight, actor.head.bias)


def _back(actor: Actor, of_output_BA: Tensor, top_BH: Tensor, way: Pass) -> list[Tensor]:
    """Return the gradients of an actor's parameters, in their order, from that of its output."""
    of_hidden, _ = stack_backward((of_output_BA @ actor.head.weight).unsqueeze(0), way)
    return [*of_hidden[::2], *of_hidden[1::2], of_output_BA.t() @ top_BH, of_output_BA.sum(0)]


@torch.no_grad()
def temperature_gradient(
    temperature: Temperature,
    batch: Batch,
    target_entropy: float,
    share: float | Tensor | None,
    *,
    report: bool,
) -> Found:
    """Compute the gradient of `share` times `temperature_loss`."""
    return [(batch.log_prob.mean() + target_entropy) * (-1.0 if share is None else -share)], {}
