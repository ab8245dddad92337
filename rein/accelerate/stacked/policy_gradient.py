"""Forward pass and closed-form policy gradient of several actor-critics.

Shapes: S learners, K networks of a learner, M rows of a learner, A outputs or action dimensions, H hidden features.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rein.accelerate.closed_form import categorical_score, normal_score
from rein.accelerate.fused_layers import Pass, stack_backward, stack_forward
from rein.networks.actor_critic import ActorCritic
from rein.ops.distributions import Categorical, Normal, SquashedNormal
from rein.ops.losses import clipped_surrogate_slope, clipped_value_slope


class Outputs(NamedTuple):
    """Distributions and values of all learners."""

    distribution: Any  # Categorical, Normal or SquashedNormal of (S, M) rows
    value: Tensor  # (S, M)


def hidden_layers(parameters: Mapping[str, Tensor], prefix: str = "hidden") -> list[Tensor]:
    """Return weight (S K, I, H) and bias (S K, 1, H) of each layer of a `Stack` in turn."""
    layers = sum(name.startswith(f"{prefix}.weights.") for name in parameters)
    names = [f"{prefix}.{kind}.{layer}" for layer in range(layers) for kind in ("weights", "biases")]
    return [parameters[name].flatten(0, 1) for name in names]


def forward(networks: ActorCritic, parameters: Mapping[str, Tensor], x_SMF: Tensor) -> tuple[Outputs, Tensor, Pass]:
    """Return the outputs for observations, the features (S, K, M, H) of the last hidden layers, and the saved pass.

    `networks` are those of one learner, whose options are those of all.
    """
    layers = hidden_layers(parameters)
    members = len(layers[0]) // len(x_SMF)
    x_KMF = x_SMF if members == 1 else x_SMF.repeat_interleave(members, 0)
    top_KMH, saved = stack_forward(x_KMF, layers, networks.hidden.activation)
    top_SKMH = top_KMH.unflatten(0, (len(x_SMF), members))
    head: Any = networks.policy_head
    weight, bias = parameters["policy_head.linear.weight"], parameters["policy_head.linear.bias"]
    output_SMA = torch.baddbmm(bias.unsqueeze(1), top_SKMH[:, 0], weight.mT)
    weight, bias = parameters["value_head.weight"], parameters["value_head.bias"]
    value_SM = torch.baddbmm(bias.unsqueeze(1), top_SKMH[:, -1], weight.mT).squeeze(-1)
    if "policy_head.log_std" not in parameters:
        return Outputs(Categorical.from_logits(output_SMA), value_SM), top_SKMH, saved
    kind = SquashedNormal if head.squash else Normal
    log_std = parameters["policy_head.log_std"].unsqueeze(1).expand_as(output_SMA)
    return Outputs(kind(output_SMA, log_std, head.low, head.high), value_SM), top_SKMH, saved


def policy_gradient(
    networks: ActorCritic, parameters: Mapping[str, Tensor], batch: Mapping[str, Tensor], coefficients: Any
) -> tuple[dict[str, Tensor], Outputs, Tensor]:
    """Compute `rein.accelerate.closed_form.policy_gradient` for all learners.

    Returns the gradients (S, ...), the outputs and the log probabilities (S, M).

    Args:
        networks: those of one learner.
        parameters: those of all learners, (S, ...).
        batch: columns (S, M, ...) of `rein.agents.base.learner.Batch`, without `valid` if all rows are valid.
        coefficients: `rein.agents.base.on_policy.Coefficients` of tensors (S, 1) or numbers.
    """
    outputs, top_SKMH, saved = forward(networks, parameters, batch["features"])
    distribution, value_SM = outputs
    log_prob_SM = distribution.log_prob(batch["sample"])
    advantage_SM, clip = batch["advantage"], coefficients.clip
    weight: Any = 1.0 / value_SM.shape[1]
    if "valid" in batch:
        valid_SM = batch["valid"]
        weight = valid_SM.to(value_SM.dtype) / valid_SM.sum(1, keepdim=True).clamp(min=1)
    if clip is None:
        slope_SM = -advantage_SM * weight
    else:
        slope_SM = clipped_surrogate_slope(log_prob_SM, batch["log_prob"], advantage_SM, clip).mul_(weight)
    bonus_SM = None
    if isinstance(coefficients.entropy, Tensor) or coefficients.entropy != 0.0:
        bonus_SM = torch.ones_like(slope_SM) * (-coefficients.entropy * weight)
    gradients: dict[str, Tensor] = {}
    if isinstance(distribution, Categorical):
        score_SMA = categorical_score(distribution.log_probs, batch["sample"].long(), slope_SM, bonus_SM)
    else:
        score_SMA, of_log_std_SMA = normal_score(
            distribution.mean, distribution.log_std, batch["sample"], slope_SM, bonus_SM
        )
        gradients["policy_head.log_std"] = of_log_std_SMA.sum(1)
    if coefficients.value_clip is None:
        error_SM = value_SM - batch["target"]
    else:
        error_SM = clipped_value_slope(value_SM, batch["value"], batch["target"], coefficients.value_clip)
    of_value_SM1 = error_SM.mul_(weight).mul_(coefficients.value).unsqueeze(-1)

    of_top_SKMH = torch.empty_like(top_SKMH)
    of_top_SKMH[:, 0] = torch.bmm(score_SMA, parameters["policy_head.linear.weight"])
    if top_SKMH.shape[1] == 1:
        of_top_SKMH[:, 0] += of_value_SM1 * parameters["value_head.weight"]
    else:
        torch.mul(of_value_SM1, parameters["value_head.weight"], out=of_top_SKMH[:, 1])
    of_hidden, _ = stack_backward(of_top_SKMH.flatten(0, 1), saved)
    for layer, (of_weight, of_bias) in enumerate(zip(of_hidden[::2], of_hidden[1::2], strict=True)):
        gradients[f"hidden.weights.{layer}"], gradients[f"hidden.biases.{layer}"] = of_weight, of_bias
    shape = top_SKMH.shape[:2]
    gradients = {
        name: gradient.unflatten(0, shape) if name.startswith("hidden") else gradient
        for name, gradient in gradients.items()
    }
    gradients["policy_head.linear.weight"] = torch.bmm(score_SMA.mT, top_SKMH[:, 0])
    gradients["policy_head.linear.bias"] = score_SMA.sum(1)
    gradients["value_head.weight"] = torch.bmm(of_value_SM1.mT, top_SKMH[:, -1])
    gradients["value_head.bias"] = of_value_SM1.sum(1)
    return gradients, outputs, log_prob_SM
