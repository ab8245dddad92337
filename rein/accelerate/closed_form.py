"""Closed-form gradients of losses for multilayer perceptrons, which are faster than autograd.

Updates of small networks spend most time on the overhead of many small operations. `FastLearner` uses these functions
for the default networks, and autograd otherwise.

Shapes: K critics, M or B rows, F features of an observation, A outputs or action dimensions, H hidden features. The
prefix `grad_` marks the gradient of the loss with respect to a value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rein.accelerate.fused_layers import FUSED, Pass, relu_backward, stack_backward, stack_forward
from rein.agents.base.learner import Batch
from rein.agents.base.on_policy import Coefficients, report_metrics
from rein.agents.base.soft_actor_critic import Temperature
from rein.networks.actor_critic import ActorCritic
from rein.networks.encoder import inputs_of
from rein.networks.heads import ContinuousHead, DiscreteHead, ProductHead
from rein.networks.mlp import Stack
from rein.networks.off_policy import LOG_STD, Actor, Critics, critic_features
from rein.networks.q_networks import QNetwork
from rein.ops.distributions import Categorical, Normal, SquashedNormal
from rein.ops.losses import clipped_surrogate_slope, clipped_value_slope, huber

Result = tuple[list[Tensor], dict[str, Tensor]]
Gradient = Callable[..., Any]  # (networks, batch, coefficients, share, report=) -> Result | None


def gradient_of(loss: Any, networks: nn.Module) -> Gradient | None:
    """Return the closed-form gradient of a loss of rein for these networks, or None."""
    name = f"{getattr(loss, '__module__', '')}.{getattr(loss, '__qualname__', '')}"
    return _GRADIENTS.get(name) if isinstance(networks, Temperature) or has_closed_form(networks) else None


def has_closed_form(networks: nn.Module) -> bool:
    """Return whether the gradients of all layers and heads of `networks` are implemented here."""
    hidden = getattr(networks, "hidden", None)  # None for custom networks
    plain = type(hidden) is Stack and len(hidden.layers) > 0 and hidden.activation in FUSED and networks.encoder is None
    if isinstance(networks, QNetwork):
        return plain and isinstance(networks.head, nn.Linear)
    if not isinstance(networks, ActorCritic):
        return plain
    head, plain = networks.policy_head, plain and not networks.cores and networks.critic_hidden is None
    if isinstance(head, DiscreteHead):
        return plain and head.single
    if isinstance(head, ProductHead):
        return False
    return plain and head.squash != "ball" and not head.state_dependent_std


def _covers(networks: ActorCritic, coefficients: Coefficients) -> bool:
    squashed = isinstance(networks.policy_head, ContinuousHead) and bool(networks.policy_head.squash)
    without_entropy = not isinstance(coefficients.entropy, Tensor) and coefficients.entropy == 0.0
    return without_entropy or not squashed


@torch.no_grad()
def policy_gradient(
    networks: ActorCritic, batch: Batch, coefficients: Coefficients, share: float | Tensor | None, *, report: bool
) -> Result | None:
    """Compute the gradient of `share` times `policy_loss`, in the order of `networks.parameters()`, and its metrics.

    Returns None if the loss with these coefficients is not implemented here.

    With row weight w = 1 / M and slope g of the surrogate with respect to log pi (`clipped_surrogate_slope`)::

        d loss / d output = w (g d log pi / d output - c_entropy d H / d output)
        d loss / d value  = w c_value (value - target), or 0 in rows with a clipped value (`clipped_value_slope`)

    Backpropagation through two linear heads and the hidden layers follows (Rumelhart, Hinton & Williams 1986).
    """
    if not _covers(networks, coefficients):
        return None
    inputs = inputs_of(batch.features)
    top_KMH, saved = stack_forward(inputs.features, networks.hidden.layers, networks.hidden.activation)
    actor_MH, critic_MH = top_KMH[0], top_KMH[-1]
    head: Any = networks.policy_head
    value_head = networks.value_head
    output_MA = head.linear(actor_MH)
    value_M = F.linear(critic_MH, value_head.weight, value_head.bias).squeeze(-1)
    distribution = head.distribution(output_MA, inputs.action_mask)
    log_prob_M = distribution.log_prob(batch.sample)

    weight = _row_weight(batch, share)
    if coefficients.clip is None:
        slope_M = -batch.advantage * weight
    else:
        slope_M = clipped_surrogate_slope(log_prob_M, batch.log_prob, batch.advantage, coefficients.clip).mul_(weight)
    entropy_weight_M = None
    if isinstance(coefficients.entropy, Tensor) or coefficients.entropy != 0.0:
        entropy_weight_M = (torch.ones_like(slope_M) * weight) * -coefficients.entropy
    grad_output_MA, grad_log_std = _policy_score(distribution, batch.sample, slope_M, entropy_weight_M)
    if inputs.action_mask is not None:
        grad_output_MA.masked_fill_(~inputs.action_mask, 0.0)
    if coefficients.value_clip is None:
        error_M = value_M - batch.target
    else:
        error_M = clipped_value_slope(value_M, batch.value, batch.target, coefficients.value_clip)
    grad_value_M1 = error_M.mul_(weight * coefficients.value).unsqueeze(-1)

    grad_top_KMH = torch.empty_like(top_KMH)
    torch.mm(grad_output_MA, head.linear.weight, out=grad_top_KMH[0])
    if len(grad_top_KMH) == 1:
        grad_top_KMH[0].addmm_(grad_value_M1, value_head.weight)
    else:
        torch.mm(grad_value_M1, value_head.weight, out=grad_top_KMH[1])
    grad_hidden, _ = stack_backward(grad_top_KMH, saved)
    gradients = [*grad_hidden[::2], *grad_hidden[1::2]]  # weights before biases, as in `networks.parameters()`
    gradients += grad_log_std
    gradients += [
        grad_output_MA.t() @ actor_MH,
        grad_output_MA.sum(0),
        grad_value_M1.t() @ critic_MH,
        grad_value_M1.sum(0),
    ]
    metrics = {}
    if report:
        metrics = report_metrics(distribution, log_prob_M, value_M, batch, coefficients)
        metrics = metrics if share is None else {name: value * share for name, value in metrics.items()}
    return gradients, metrics


def _row_weight(batch: Batch, share: float | Tensor | None) -> float | Tensor:
    """Return the weight of each row in the mean, as a number or (M,)."""
    if batch.valid is None:
        weight = 1.0 / batch.size
    else:
        weight = batch.valid.to(batch.target.dtype) / batch.valid.sum().clamp(min=1)
    return weight if share is None else weight * share


def _policy_score(
    distribution: object, sample: Tensor, slope_M: Tensor, entropy_weight_M: Tensor | None
) -> tuple[Tensor, list[Tensor]]:
    """Return the gradients of the output of the head, (M, A), and of its free parameters."""
    if isinstance(distribution, Categorical):
        return categorical_score(distribution.log_probs, sample.long(), slope_M, entropy_weight_M), []
    if isinstance(distribution, Normal | SquashedNormal):  # the term of squashing depends on the sample only
        settings = distribution.mean, distribution.log_std, sample, slope_M, entropy_weight_M
        grad_mean_MA, grad_log_std_MA = normal_score(*settings)
        return grad_mean_MA, [grad_log_std_MA.sum(0)]
    raise TypeError(f"no closed-form gradient for {type(distribution).__name__}")


def categorical_score(
    log_probs_NA: Tensor, sample_N: Tensor, weight_N: Tensor, entropy_weight_N: Tensor | None = None
) -> Tensor:
    """Compute the gradient of weighted log probabilities and entropies with respect to logits, (N, A).

    The derivatives are::

        d log pi(a) / d logit_j = [j = a] - p_j
        d H / d logit_j = -p_j (log p_j + H)
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
    """Compute the gradients with respect to the mean and the log standard deviation of each row, (N, A) each.

    With z = (a - mean) / std::

        d log pi(a) / d mean = z / std
        d log pi(a) / d log std = z^2 - 1
        d H / d log std = 1
    """
    inverse_std = torch.exp(-log_std)
    z_NA = (sample_NA - mean_NA) * inverse_std
    weight_N1 = weight_N.unsqueeze(-1)
    grad_log_std_NA = (z_NA.square() - 1.0) * weight_N1
    if entropy_weight_N is not None:
        grad_log_std_NA += entropy_weight_N.unsqueeze(-1)
    return z_NA * inverse_std * weight_N1, grad_log_std_NA


@torch.no_grad()
def td_gradient(
    networks: QNetwork, batch: Batch, delta: float | None, share: float | Tensor | None, *, report: bool
) -> Result | None:
    """Compute the gradient of `share` times `rein.agents.dqn.td_loss`. Returns None for heads that are not linear.

    For the recorded action::

        d loss / d Q(s, a) = w clamp(Q(s, a) - y, -delta, delta) / M
    """
    hidden, head = networks.hidden, networks.head
    if not isinstance(hidden, Stack) or not isinstance(head, nn.Linear):
        return None
    top_1MH, saved = stack_forward(batch.features, hidden.layers, hidden.activation)
    action_M1 = batch.action.unsqueeze(1)
    value_MA = F.linear(top_1MH[0], head.weight, head.bias)
    error_M1 = value_MA.gather(1, action_M1) - batch.target.unsqueeze(1)
    scale = (1.0 / batch.size) * (1.0 if share is None else share)
    slope_M1 = (error_M1 if delta is None else error_M1.clamp(-delta, delta)) * scale
    if batch.weight is not None:
        slope_M1 *= batch.weight.unsqueeze(1)
    grad_value_MA = torch.zeros_like(value_MA).scatter_(1, action_M1, slope_M1)
    grad_hidden, _ = stack_backward((grad_value_MA @ head.weight).unsqueeze(0), saved)
    metrics = {"td_error": error_M1.abs().squeeze(1)}
    if report:
        loss_M1 = huber(error_M1, delta) * scale
        loss_M1 = loss_M1 if batch.weight is None else loss_M1 * batch.weight.unsqueeze(1)
        metrics |= {"value_loss": loss_M1.sum(), "action_value": value_MA.gather(1, action_M1).sum() * scale}
    grad_head = [grad_value_MA.t() @ top_1MH[0], grad_value_MA.sum(0)]
    return [*grad_hidden[::2], *grad_hidden[1::2], *grad_head], metrics


@torch.no_grad()
def critic_gradient(
    critics: Critics, batch: Batch, coefficients: None, share: float | Tensor | None, *, report: bool
) -> Result:
    """Compute the gradient of `share` times `critic_loss`: `d loss / d Q_k(s, a) = w (Q_k(s, a) - y) / B`.

    Source: Rumelhart, Hinton & Williams 1986.
    """
    value_KB, top_KBH, saved = _forward(critics, critic_features(None, batch.features), batch.action)
    error_KB = value_KB - batch.target
    slope_KB = error_KB * ((1.0 / batch.size) * (1.0 if share is None else share))
    if batch.weight is not None:
        slope_KB = slope_KB * batch.weight
    grad_hidden, _ = stack_backward(slope_KB.unsqueeze(-1) * critics.weight, saved)
    grad_weight, grad_bias = torch.bmm(slope_KB.unsqueeze(1), top_KBH), slope_KB.sum(1, keepdim=True)
    metrics = {"td_error": error_KB.abs().mean(0)}
    if report:
        loss = 0.5 * (slope_KB * error_KB).sum()
        metrics |= {"critic_loss": loss, "action_value": value_KB.mean() * (1.0 if share is None else share)}
    return [grad_weight, grad_bias, *grad_hidden[::2], *grad_hidden[1::2]], metrics


@torch.no_grad()
def soft_actor_gradient(
    actor: Actor, batch: Batch, coefficients: Any, share: float | Tensor | None, *, report: bool
) -> Result | None:
    """Compute the gradient of `share` times `rein.agents.base.soft_actor_critic.soft_actor_loss`.

    With a = tanh(mean + std * noise) and m the critic with the smallest value, B times the gradient is::

        d / d mean    = 2 alpha a - (1 - a^2) d Q_m / d a
        d / d log std = d / d mean * std * noise - alpha,  or 0 if log std is clamped

    Source: Haarnoja et al. 2018, equation 9 (reparameterization).
    """
    critics, temperature = coefficients
    if not has_closed_form(critics):
        return None
    top_BH, saved, output_BA = _act(actor, inputs_of(batch.features).features)
    x_BF = critic_features(None, batch.features)
    mean, raw_log_std = output_BA.chunk(2, -1)
    log_std = raw_log_std.clamp(*LOG_STD)
    distribution = SquashedNormal(mean, log_std, -actor.bound, actor.bound)  # type: ignore[operator, arg-type]  # a buffer is a Tensor
    spread_BA = log_std.exp().mul_(batch.noise)
    sample_BA = mean + spread_BA
    action_BA = sample_BA.tanh()
    log_prob_B = distribution.log_prob(sample_BA)
    value_KB, _, critics_saved = _forward(critics, x_BF, action_BA)
    value_B, chosen_B = value_KB.min(0)
    scale = (1.0 / batch.size) * (1.0 if share is None else share)
    grad_action_BA = _action_gradient(critics, chosen_B, critics_saved, x_BF.shape[1])
    grad_mean = (2.0 * temperature) * action_BA - torch.addcmul(
        grad_action_BA, grad_action_BA, action_BA.square(), value=-1
    )
    grad_log_std = torch.addcmul(-temperature, grad_mean, spread_BA).masked_fill_(log_std != raw_log_std, 0.0)
    gradients = _back(actor, torch.cat((grad_mean, grad_log_std), 1).mul_(scale), top_BH, saved)
    metrics = {"log_prob": log_prob_B}
    if report:
        loss = (temperature * log_prob_B - value_B).sum() * scale
        metrics |= {"actor_loss": loss, "entropy": -log_prob_B.sum() * scale}
    return gradients, metrics


@torch.no_grad()
def deterministic_actor_gradient(
    actor: Actor, batch: Batch, coefficients: Any, share: float | Tensor | None, *, report: bool
) -> Result | None:
    """Compute the gradient of `share` times `deterministic_actor_loss`.

    With output u of the actor and a = tanh u::

        d loss / d u = -(1 - a^2) d Q_1 / d a / B
    """
    (critics,) = coefficients
    if not has_closed_form(critics):
        return None
    top_BH, saved, output_BA = _act(actor, inputs_of(batch.features).features)
    x_BF = critic_features(None, batch.features)
    action_BA = output_BA.tanh()
    value_1B, _, critics_saved = _forward(critics, x_BF, action_BA, 1)
    scale = (1.0 / batch.size) * (1.0 if share is None else share)
    grad_action_BA = _critic_action_gradient(critics, 0, critics_saved, x_BF.shape[1])
    grad_output_BA = torch.addcmul(grad_action_BA, grad_action_BA, action_BA.square(), value=-1.0).mul_(-scale)
    metrics = {"actor_loss": -value_1B.sum() * scale} if report else {}
    return _back(actor, grad_output_BA, top_BH, saved), metrics


def _forward(
    critics: Critics, x_BF: Tensor, action_BA: Tensor, members: int | None = None
) -> tuple[Tensor, Tensor, Pass]:
    """Return the values (K, B) of the first `members`, the last hidden features, and the saved forward pass."""
    hidden = critics.hidden
    layers, weight_K1H, bias_K1 = hidden.layers, critics.weight, critics.bias
    if members is not None:
        layers = [parameter[:members] for parameter in layers]
        weight_K1H, bias_K1 = weight_K1H[:members], bias_K1[:members]
    top_KBH, saved = stack_forward(torch.cat((x_BF, action_BA), 1), layers, hidden.activation)
    return torch.baddbmm(bias_K1.unsqueeze(-1), top_KBH, weight_K1H.mT).squeeze(-1), top_KBH, saved


def _action_gradient(critics: Critics, chosen_B: Tensor, saved: Pass, features: int) -> Tensor:
    """Return the gradient (B, A) of each row's selected critic with respect to the action.

    On the CPU, each critic computes only the rows it was selected for. On other devices, counting these rows would
    synchronize with the device.
    """
    if chosen_B.device.type != "cpu" or torch.compiler.is_compiling():
        grad_value_KB = critics.weight.new_zeros(critics.members, len(chosen_B))
        grad_top_KBH = grad_value_KB.scatter_(0, chosen_B.unsqueeze(0), 1.0).unsqueeze(-1) * critics.weight
        _, grad_input_KBI = stack_backward(grad_top_KBH, saved, of_input=True, of_parameters=False)
        return grad_input_KBI[..., features:].sum(0)  # type: ignore[index]  # not None, since of_input=True
    grad_action_BA = critics.weight.new_empty(len(chosen_B), saved.weights[0].shape[1] - features)
    for k in range(critics.members):
        (row_R,) = (chosen_B == k).nonzero(as_tuple=True)
        grad_action_BA.index_copy_(0, row_R, _critic_action_gradient(critics, k, saved, features, row_R))
    return grad_action_BA


def _critic_action_gradient(
    critics: Critics, k: int, saved: Pass, features: int, row_R: Tensor | None = None
) -> Tensor:
    """Return the gradient of critic k with respect to the action, for some rows or all."""
    outputs = [layer[k] if row_R is None else layer[k].index_select(0, row_R) for layer in saved.outputs]
    slope = critics.weight[k].expand_as(outputs[-1])
    derivative = relu_backward if saved.activation == "relu" else torch.ops.aten.sigmoid_backward
    for layer in range(len(outputs) - 1, -1, -1):
        weight_IH = saved.weights[layer][k]
        slope = derivative(slope, outputs[layer]) @ (weight_IH if layer else weight_IH[features:]).t()
    return slope if saved.activation == "relu" else slope * 2.0


def _act(actor: Actor, x_BF: Tensor) -> tuple[Tensor, Pass, Tensor]:
    hidden = actor.hidden
    top_1BH, saved = stack_forward(x_BF, hidden.layers, hidden.activation)
    return top_1BH[0], saved, F.linear(top_1BH[0], actor.head.weight, actor.head.bias)


def _back(actor: Actor, grad_output_BA: Tensor, top_BH: Tensor, saved: Pass) -> list[Tensor]:
    """Return the gradients of the actor's parameters, in their order, given the gradient of the output."""
    grad_hidden, _ = stack_backward((grad_output_BA @ actor.head.weight).unsqueeze(0), saved)
    return [*grad_hidden[::2], *grad_hidden[1::2], grad_output_BA.t() @ top_BH, grad_output_BA.sum(0)]


@torch.no_grad()
def temperature_gradient(
    temperature: Temperature,
    batch: Batch,
    target_entropy: float,
    share: float | Tensor | None,
    *,
    report: bool,
) -> Result:
    """Compute the gradient of `share` times `temperature_loss`."""
    return [(batch.log_prob.mean() + target_entropy) * (-1.0 if share is None else -share)], {}


_GRADIENTS: dict[str, Gradient] = {  # by the name of the loss
    "rein.agents.base.on_policy.policy_loss": policy_gradient,
    "rein.agents.base.actor_and_critics.critic_loss": critic_gradient,
    "rein.agents.base.deterministic.deterministic_actor_loss": deterministic_actor_gradient,
    "rein.agents.base.soft_actor_critic.soft_actor_loss": soft_actor_gradient,
    "rein.agents.base.soft_actor_critic.temperature_loss": temperature_gradient,
    "rein.agents.dqn.td_loss": td_gradient,
}
