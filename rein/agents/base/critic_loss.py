"""Losses of critics, actors and temperatures of continuous actions, and their gradients in closed form.

Shapes: K critics, B rows, F features of an observation, A dimensions of an action, H hidden features.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rein.networks.continuous import LOG_STD, Actor, Critics
from rein.networks.mlp import Stack
from rein.ops.distributions import SquashedNormal
from rein.ops.stack import FUSED, Pass, relu_backward, stack_backward, stack_forward

Batch = TypeVar("Batch", bound=tuple[Any, ...])


def take_rows(batch: Batch, index: Any) -> Batch:
    """Some of the rows, a slice or a tensor of their numbers; a column that is None stays so."""
    columns = (None if column is None else column[index] for column in batch)
    return type(batch)(*columns)  # type: ignore[arg-type]  # columns in their order


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


Found = tuple[list[Tensor], dict[str, Tensor]]


def has_closed_form(networks: nn.Module) -> bool:
    """Whether there are but hidden layers and a head, and a way back through these is written out."""
    hidden = networks.hidden
    return networks.stem is None and isinstance(hidden, Stack) and len(hidden.layers) > 0 and hidden.activation in FUSED


@torch.no_grad()
def critic_gradient(
    critics: Critics, batch: CriticBatch, coefficients: None, share: float | Tensor | None, *, report: bool
) -> Found:
    """What autograd makes of `share` times `critic_loss`: d loss / d Q_k(s, a) = w (Q_k(s, a) - y) / B, and from there.

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
    actor: Actor, batch: ActorBatch, coefficients: Any, share: float | Tensor | None, *, report: bool
) -> Found:
    """What autograd makes of `share` times `soft_actor_loss`.

    With u = mean + std * noise, a = tanh u, and m the critic whose value is the least, B times the gradient is

        d / d mean    = 2 alpha a - (1 - a^2) d Q_m / d a
        d / d log std = d / d mean * std * noise - alpha        and 0 where log std is at its bounds

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
    actor: Actor, batch: ActorBatch, coefficients: Any, share: float | Tensor | None, *, report: bool
) -> Found:
    """What autograd makes of `share` times `deterministic_actor_loss`: -(1 - a^2) d Q_1 / d a / B at a = tanh u."""
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
    """The values (K, B) by the first `members`, the last hidden features, and what the way back needs."""
    hidden = critics.hidden
    layers, weight_K1H, bias_K1 = hidden.layers, critics.weight, critics.bias
    if members is not None:
        layers = [parameter[:members] for parameter in layers]
        weight_K1H, bias_K1 = weight_K1H[:members], bias_K1[:members]
    top_KBH, way = stack_forward(torch.cat((x_BF, action_BA), 1), layers, hidden.activation)
    return torch.baddbmm(bias_K1.unsqueeze(-1), top_KBH, weight_K1H.mT).squeeze(-1), top_KBH, way


def _of_action(critics: Critics, chosen_B: Tensor, way: Pass, features: int) -> Tensor:
    """The gradient (B, A) of the value by the critic that is chosen for each row, with respect to the action.

    Each critic goes back with its own rows alone, where to know how many these are is not to wait, or to compile anew.
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
    """That of critic k, in these rows or in all."""
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
    """From the gradient of what an actor puts out to those of its parameters, in their order."""
    of_hidden, _ = stack_backward((of_output_BA @ actor.head.weight).unsqueeze(0), way)
    return [*of_hidden[::2], *of_hidden[1::2], of_output_BA.t() @ top_BH, of_output_BA.sum(0)]


class Temperature(nn.Module):
    """alpha, by its logarithm."""

    def __init__(self, initial: float, device: torch.device) -> None:
        super().__init__()
        self.log = nn.Parameter(torch.full((), math.log(initial), dtype=torch.float32, device=device))


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
