"""Forward and backward pass of several multilayer perceptrons, and closed-form gradients of losses with action values.

The equations are those of `rein.accelerate.closed_form`.

Shapes: S learners, K networks of a learner, B rows of a learner, F features of an observation, A action dimensions or
Discrete actions, I inputs, H hidden features, O outputs. The prefix `grad_` marks the gradient of the loss with respect
to a value.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from rein.accelerate.fused_layers import Pass, stack_backward, stack_forward
from rein.accelerate.stacked.parameters import StackedModules
from rein.networks.off_policy import LOG_STD
from rein.ops.distributions import SquashedNormal
from rein.ops.losses import huber

Gradients = dict[str, Tensor]  # (S, ...) by the name of the parameter
Metrics = dict[str, Tensor]  # (S,) each


class Forward(NamedTuple):
    """Result of a forward pass of S K networks, and the tensors that the backward pass needs."""

    output: Tensor  # (S, K, B, O)
    top: Tensor  # (S K, B, H) features of the last hidden layer
    head: Tensor  # (S K, O, H) weight of the head
    saved: Pass


class StackedMLPs:
    """S times K multilayer perceptrons with a linear head: an `Actor`, `Critics` or a `QNetwork` of each learner."""

    def __init__(self, modules: StackedModules) -> None:
        first: Any = modules.modules[0]
        self.modules = modules
        self.activation = first.hidden.activation
        names = [(f"hidden.weights.{i}", f"hidden.biases.{i}") for i in range(len(first.hidden.weights))]
        self._layers = [name for pair in names for name in pair]
        self._head = ("head.weight", "head.bias") if "head.weight" in modules.parameters else ("weight", "bias")
        self._single = self._head[0] == "head.weight"  # whether the parameters of the head lack the axis of K networks

    def forward(self, x_SBI: Tensor, members: int | None = None) -> Forward:
        """Return the outputs of the first `members` networks of each learner, by default of all."""
        layers = [self._flat(name, members) for name in self._layers]
        weight, bias = (self._flat(name, members) for name in self._head)
        repeats = len(weight) // len(x_SBI)
        top, saved = stack_forward(
            x_SBI.repeat_interleave(repeats, 0) if repeats > 1 else x_SBI, layers, self.activation
        )
        output = torch.baddbmm(bias.unsqueeze(1), top, weight.mT).unflatten(0, (len(x_SBI), repeats))
        return Forward(output, top, weight, saved)

    def backward(self, forward: Forward, grad_output_SKBO: Tensor) -> Gradients:
        """Return the gradients of all parameters."""
        grad_output = grad_output_SKBO.flatten(0, 1)
        gradients, _ = stack_backward(_grad_top(grad_output, forward.head), forward.saved)
        gradients += [torch.bmm(grad_output.mT, forward.top), grad_output.sum(1)]
        parameters, names = self.modules.parameters, (*self._layers, *self._head)
        return {name: gradient.view_as(parameters[name]) for name, gradient in zip(names, gradients, strict=True)}

    def input_gradient(self, forward: Forward, grad_output_SKBO: Tensor, first: int) -> Tensor:
        """Return the gradients (S, B, I - first) of the inputs, without the `first` ones, summed over K networks."""
        below, outputs, weights, activation = forward.saved
        saved = Pass(below, outputs, [weights[0][:, first:], *weights[1:]], activation)
        grad_top = _grad_top(grad_output_SKBO.flatten(0, 1), forward.head)
        _, grad_input = stack_backward(grad_top, saved, of_input=True, of_parameters=False)
        grad_input_SKBI = grad_input.unflatten(0, grad_output_SKBO.shape[:2])  # type: ignore[union-attr]  # not None, since of_input=True
        return grad_input_SKBI.squeeze(1) if grad_input_SKBI.shape[1] == 1 else grad_input_SKBI.sum(1)

    def _flat(self, name: str, members: int | None) -> Tensor:
        """Return a parameter of the networks of all learners, (S K, ...)."""
        parameter = self.modules.parameters[name]
        return parameter if self._single and name in self._head else parameter[:, :members].flatten(0, 1)


def _grad_top(grad_output: Tensor, head: Tensor) -> Tensor:
    return grad_output * head if head.shape[1] == 1 else torch.bmm(grad_output, head)


def soft_actions(actor: StackedMLPs, x_SBF: Tensor, noise_SBA: Tensor) -> tuple[Forward, SquashedNormal, Tensor]:
    """Return the forward pass and the distribution of stochastic actors, and samples before tanh, (S, B, A)."""
    forward = actor.forward(x_SBF)
    mean, log_std = forward.output.squeeze(1).chunk(2, -1)
    bound: Any = actor.modules.modules[0].bound
    distribution = SquashedNormal(mean, log_std.clamp(*LOG_STD), -bound, bound)
    return forward, distribution, distribution.sample_from(noise_SBA)


def critic_gradient(
    critics: StackedMLPs, x_SBI: Tensor, target_SB: Tensor, weight_SB: Tensor | None, *, report: bool
) -> tuple[Gradients, Metrics, Tensor]:
    """Compute the gradient of half the mean squared error, summed over critics. Also returns the errors (S, K, B)."""
    forward = critics.forward(x_SBI)
    value_SKB = forward.output.squeeze(-1)
    error_SKB = value_SKB - target_SB.unsqueeze(1)
    slope_SKB = error_SKB * (1.0 / error_SKB.shape[-1])
    if weight_SB is not None:
        slope_SKB = slope_SKB * weight_SB.unsqueeze(1)
    metrics = {}
    if report:
        loss_S = 0.5 * (slope_SKB * error_SKB).sum((1, 2))
        metrics = {"critic_loss": loss_S, "action_value": value_SKB.mean((1, 2))}
    return critics.backward(forward, slope_SKB.unsqueeze(-1)), metrics, error_SKB


def soft_actor_gradient(
    actor: StackedMLPs, critics: StackedMLPs, x_SBF: Tensor, noise_SBA: Tensor, alpha_S1: Tensor, *, report: bool
) -> tuple[Gradients, Metrics, Tensor]:
    """Compute the gradient of mean (alpha * log pi(a | s) - min_k Q_k(s, a)). Also returns log pi(a | s), (S, B)."""
    forward, distribution, sample_SBA = soft_actions(actor, x_SBF, noise_SBA)
    action_SBA = sample_SBA.tanh()
    log_prob_SB = distribution.log_prob(sample_SBA)
    q = critics.forward(torch.cat((x_SBF, action_SBA), -1))
    value_SB, chosen_SB = q.output.squeeze(-1).min(1)
    grad_value_SKB1 = torch.zeros_like(q.output).scatter_(1, chosen_SB[:, None, :, None], 1.0)
    grad_action_SBA = critics.input_gradient(q, grad_value_SKB1, x_SBF.shape[-1])
    alpha_S11 = alpha_S1.unsqueeze(-1)
    grad_mean = 2.0 * alpha_S11 * action_SBA - torch.addcmul(
        grad_action_SBA, grad_action_SBA, action_SBA.square(), value=-1.0
    )
    raw_log_std = forward.output.squeeze(1).chunk(2, -1)[1]
    grad_log_std = torch.addcmul(-alpha_S11, grad_mean, distribution.log_std.exp() * noise_SBA)
    grad_log_std = grad_log_std.masked_fill(distribution.log_std != raw_log_std, 0.0)
    grad_output = torch.cat((grad_mean, grad_log_std), -1).mul_(1.0 / x_SBF.shape[1])
    metrics = {}
    if report:
        loss_S = (alpha_S1 * log_prob_SB - value_SB).mean(1)
        metrics = {"actor_loss": loss_S, "entropy": -log_prob_SB.mean(1)}
    return actor.backward(forward, grad_output.unsqueeze(1)), metrics, log_prob_SB


def deterministic_actor_gradient(
    actor: StackedMLPs, critics: StackedMLPs, x_SBF: Tensor, *, report: bool
) -> tuple[Gradients, Metrics]:
    """Compute the gradient of -mean Q_1(s, mu(s))."""
    forward = actor.forward(x_SBF)
    action_SBA = forward.output.squeeze(1).tanh()
    q = critics.forward(torch.cat((x_SBF, action_SBA), -1), 1)
    slope = torch.full_like(q.output, -1.0 / x_SBF.shape[1])
    grad_action_SBA = critics.input_gradient(q, slope, x_SBF.shape[-1])
    grad_output = torch.addcmul(grad_action_SBA, grad_action_SBA, action_SBA.square(), value=-1.0)
    metrics = {"actor_loss": -q.output.flatten(1).mean(1)} if report else {}
    return actor.backward(forward, grad_output.unsqueeze(1)), metrics


def td_gradient(
    networks: StackedMLPs,
    x_SBF: Tensor,
    action_SB: Tensor,
    target_SB: Tensor,
    weight_SB: Tensor | None,
    delta: float | None,
    *,
    report: bool,
) -> tuple[Gradients, Metrics, Tensor]:
    """Compute the gradient of the mean Huber loss of TD errors. Also returns the errors (S, B)."""
    forward = networks.forward(x_SBF)
    action_S1B1 = action_SB[:, None, :, None]
    value_S1B1 = forward.output.gather(-1, action_S1B1)
    error_SB = value_S1B1.flatten(1) - target_SB
    scale_SB: Any = 1.0 / error_SB.shape[1]
    if weight_SB is not None:
        scale_SB = weight_SB * scale_SB
    slope_SB = (error_SB if delta is None else error_SB.clamp(-delta, delta)) * scale_SB
    grad_output = torch.zeros_like(forward.output).scatter_(-1, action_S1B1, slope_SB[:, None, :, None])
    metrics = {}
    if report:
        loss_S = (huber(error_SB, delta) * scale_SB).sum(1)
        metrics = {"value_loss": loss_S, "action_value": value_S1B1.flatten(1).mean(1)}
    return networks.backward(forward, grad_output), metrics, error_SB
