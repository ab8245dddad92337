"""Computation for several learners at once: acting, and gradients of the same kind.

A `Population` runs the updates of its agents in lockstep. Steps that all of them have reached are computed on tensors
with a leading axis of learners, because small networks spend most time on the overhead of operations.

Shapes: S learners, K networks of a learner, M rows of a minibatch, N environments of a learner, A outputs or action
dimensions, H hidden features.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rein.agents.base.closed_form import categorical_score, has_closed_form, normal_score
from rein.agents.base.learner import Batch, Learner
from rein.agents.base.losses import Coefficients, report_metrics
from rein.networks.actor_critic import ActorCritic
from rein.networks.reserved import inputs_of
from rein.ops.distributions import Categorical, Distribution, Normal, SquashedNormal
from rein.ops.losses import clipped_surrogate_slope
from rein.ops.stack import stack_backward, stack_forward
from rein.ops.trees import map_tree


class Step(NamedTuple):
    """Arguments of `Learner.step`."""

    learner: Learner
    batch: Batch
    coefficients: Any
    report: bool


def in_lockstep(updates: Sequence[Callable[[], Any]], learners: Sequence[Mapping[str, Learner]]) -> list[Any]:
    """Call functions in turns, each until its next step, and compute these steps together. Returns the results.

    A function may return before the others, which then continue without it. Raises the error of a function.

    Args:
        updates: one function for each agent.
        learners: the learners of each agent.
    """
    members = [_Member(number, update) for number, update in enumerate(updates)]
    try:
        for member, mine in zip(members, learners, strict=True):
            for learner in mine.values():
                learner.together = member.ask
        active = members
        while active:
            for member in active:
                member.run()
            active = [member for member in active if member.step is not None]
            for member, answer in zip(active, compute([member.step for member in active]), strict=True):  # type: ignore[misc]  # not None
                member.answer = answer
        return [member.result for member in members]
    finally:
        for mine in learners:
            for learner in mine.values():
                learner.together = None
        for member in members:
            member.end()


class _Cancelled(BaseException):
    """Raised in a function whose steps are no longer computed."""


class _Member:
    """Function in a thread that only runs within `run`.

    One thread runs at a time, because several threads would compete for Python's interpreter lock in each operation.
    """

    def __init__(self, number: int, update: Callable[[], Any]) -> None:
        self.step: Step | None = None  # that the function waits for
        self.answer: Any = None
        self.result: Any = None
        self._update, self._error, self._cancelled = update, None, False
        self._turn, self._back = threading.Lock(), threading.Lock()  # locked until one thread continues the other
        self._turn.acquire()
        self._back.acquire()
        self._threads_of_torch = torch.get_num_threads()
        self._thread = threading.Thread(target=self._serve, name=f"rein learner {number}", daemon=True)
        self._thread.start()

    def run(self) -> None:
        """Continue the function until its next step or its end. Raises its error."""
        self.step = None
        self._turn.release()
        self._back.acquire()
        if self._error is not None:
            raise self._error

    def ask(self, *step: Any) -> dict[str, Tensor]:
        """Wait for the metrics of a `Step`. Runs in the thread."""
        self.step = Step(*step)
        self._pass_back()
        self._turn.acquire()
        if self._cancelled:
            raise _Cancelled
        return self.answer

    def end(self) -> None:
        """End the thread, if necessary at the next step of the function."""
        if self._thread.is_alive():
            self._cancelled = True
            self._turn.release()
            self._thread.join()

    def _serve(self) -> None:
        torch.set_num_threads(self._threads_of_torch)  # torch has one setting for each thread
        self._turn.acquire()
        try:
            if not self._cancelled:
                self.result = self._update()
        except _Cancelled:
            pass
        except BaseException as error:  # raised by `run`
            self._error = error
        self._pass_back()

    def _pass_back(self) -> None:
        if not self._cancelled:
            self._back.release()


def compute(steps: Sequence[Step]) -> list[dict[str, Tensor]]:
    """Make the steps of several learners, together if possible. Returns the metrics of each."""
    if len(steps) > 1 and all(_is_policy_step(step) for step in steps) and _are_alike(steps):
        gradients, metrics = _policy_gradients(steps)
        norms = _clip(gradients, [step.learner for step in steps])
        each = zip(*(gradient.unbind() for gradient in gradients), strict=True)
        return [
            step.learner.apply(mine, found, step.report, norm)
            for step, mine, found, norm in zip(steps, each, metrics, norms, strict=True)
        ]
    return [step.learner.step_alone(*step[1:]) for step in steps]


def _clip(gradients: Sequence[Tensor], learners: Sequence[Learner]) -> Sequence[Tensor | None]:
    """Clip the gradients (S, ...) of each learner in place, and return their norms before.

    Returns None for each learner if a norm is not finite, or if a learner has a guard or a function `on_gradients`:
    `Learner.apply` then handles each learner alone.
    """
    norm_S = torch.stack([torch.linalg.vector_norm(gradient.flatten(1), dim=1) for gradient in gradients]).norm(dim=0)
    largest = [learner.max_grad_norm for learner in learners]
    watched = any(learner.guard is not None or learner.on_gradients is not None for learner in learners)
    if watched or not math.isfinite(float(norm_S.sum())):
        return [None] * len(learners)
    limit = _per_learner([math.inf if number is None else number for number in largest], norm_S.device)
    limit_S = limit.squeeze(1) if isinstance(limit, Tensor) else limit
    if limit_S is not math.inf:
        scale_S = (limit_S / (norm_S + 1e-6)).clamp(max=1.0)
        for gradient in gradients:
            gradient.mul_(scale_S.view(-1, *[1] * (gradient.ndim - 1)))
    return norm_S.unbind()


def _is_policy_step(step: Step) -> bool:
    """Return whether `_policy_gradients` implements the loss of a step."""
    learner, coefficients = step.learner, step.coefficients
    if not learner.joins or not isinstance(coefficients, Coefficients):
        return False
    squashed = bool(getattr(learner.networks.policy_head, "squash", False))
    return (
        coefficients.value_clip is None
        and not (squashed and coefficients.entropy)
        and inputs_of(step.batch.features).action_mask is None
        and step.batch.valid is None
        and len(learner.parts(step.batch)) == 1
    )


def _are_alike(steps: Sequence[Step]) -> bool:
    """Return whether the networks and the batches of all steps have the same shapes and options."""
    forms = {
        (_form(learner.networks), batch.features.shape, coefficients.clip is None)
        for learner, batch, coefficients, _ in steps
    }
    return len(forms) == 1


def _form(networks: Any) -> tuple[Any, ...]:
    """Return the shapes and options of an actor-critic, on which its computation depends."""
    shapes = tuple(parameter.shape for parameter in networks.parameters())
    return shapes, networks.hidden.members, networks.hidden.activation, getattr(networks.policy_head, "squash", None)


class _Parameters(NamedTuple):
    """Parameters of S actor-critics as tensors with a leading axis."""

    layers: list[Tensor]  # weight (S K, I, H) and bias (S K, 1, H) of each layer in turn
    policy_weight: Tensor  # (S, A, H)
    policy_bias: Tensor  # (S, 1, A)
    log_std: Tensor | None  # (S, 1, A)
    value_weight: Tensor  # (S, 1, H)
    value_bias: Tensor  # (S, 1, 1)


def _stacked(networks: Sequence[ActorCritic]) -> _Parameters:
    """Copy the parameters of S networks."""
    heads: list[Any] = [network.policy_head for network in networks]
    layers = [torch.cat(layer) for layer in zip(*(network.hidden.layers for network in networks), strict=True)]
    log_std = [head.log_std for head in heads if hasattr(head, "log_std")]
    return _Parameters(
        layers,
        torch.stack([head.linear.weight for head in heads]),
        torch.stack([head.linear.bias for head in heads]).unsqueeze(1),
        torch.stack(log_std).unsqueeze(1) if log_std else None,
        torch.stack([network.value_head.weight for network in networks]),
        torch.stack([network.value_head.bias for network in networks]).unsqueeze(1),
    )


def _forward(parameters: _Parameters, x_SMF: Tensor, activation: str) -> tuple[Tensor, Any]:
    """Return the features of the last hidden layers, (S, K, M, H), and the saved forward pass."""
    members = len(parameters.layers[0]) // len(x_SMF)
    x_KMF = x_SMF if members == 1 else x_SMF.repeat_interleave(members, 0)
    top, saved = stack_forward(x_KMF, parameters.layers, activation)
    return top.unflatten(0, (len(x_SMF), members)), saved


def _heads(parameters: _Parameters, head: Any, top_SKMH: Tensor) -> tuple[Distribution, Tensor]:
    """Return the distributions of all learners, and the values (S, M)."""
    output_SMA = torch.baddbmm(parameters.policy_bias, top_SKMH[:, 0], parameters.policy_weight.mT)
    value_SM1 = torch.baddbmm(parameters.value_bias, top_SKMH[:, -1], parameters.value_weight.mT)
    if parameters.log_std is None:
        return Categorical.from_logits(output_SMA), value_SM1.squeeze(-1)
    kind = SquashedNormal if head.squash else Normal
    return kind(output_SMA, parameters.log_std, head.low, head.high), value_SM1.squeeze(-1)


@torch.no_grad()
def _policy_gradients(steps: Sequence[Step]) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """Compute `rein.agents.base.closed_form.policy_gradient` for all learners.

    Returns the gradients (S, ...) in the order of the parameters of a network, and the metrics of each learner.
    """
    networks: list[Any] = [step.learner.networks for step in steps]
    parameters, hidden, head = _stacked(networks), networks[0].hidden, networks[0].policy_head
    batch = map_tree(lambda *columns: torch.stack(columns), *(_used(step.batch) for step in steps))
    columns = zip(*(step.coefficients for step in steps), strict=True)
    clip, value_weight, entropy_weight, _ = (_per_learner(column, batch["target"].device) for column in columns)
    top_SKMH, saved = _forward(parameters, batch["features"], hidden.activation)
    distribution, value_SM = _heads(parameters, head, top_SKMH)
    log_prob_SM = distribution.log_prob(batch["sample"])

    weight = 1.0 / log_prob_SM.shape[1]
    if clip is None:
        slope_SM = batch["advantage"] * -weight
    else:
        slope_SM = clipped_surrogate_slope(log_prob_SM, batch["log_prob"], batch["advantage"], clip).mul_(weight)
    entropy_weight_SM = None
    if isinstance(entropy_weight, Tensor) or entropy_weight != 0.0:
        entropy_weight_SM = torch.ones_like(slope_SM) * (entropy_weight * -weight)
    of_log_std: list[Tensor] = []
    if isinstance(distribution, Categorical):
        score = categorical_score(distribution.log_probs, batch["sample"].long(), slope_SM, entropy_weight_SM)
    else:
        normal: Any = distribution  # Normal or SquashedNormal
        settings = normal.mean, normal.log_std, batch["sample"], slope_SM, entropy_weight_SM
        score, of_each_SMA = normal_score(*settings)
        of_log_std = [of_each_SMA.sum(1)]
    of_value_SM1 = (value_SM - batch["target"]).mul_(value_weight).mul_(weight).unsqueeze(-1)

    of_top_SKMH = torch.empty_like(top_SKMH)
    of_top_SKMH[:, 0] = torch.bmm(score, parameters.policy_weight)
    if top_SKMH.shape[1] == 1:
        of_top_SKMH[:, 0] += of_value_SM1 * parameters.value_weight
    else:
        of_top_SKMH[:, 1] = of_value_SM1 * parameters.value_weight
    of_hidden, _ = stack_backward(of_top_SKMH.flatten(0, 1), saved)
    of_hidden = [gradient.unflatten(0, top_SKMH.shape[:2]) for gradient in of_hidden]
    gradients = [*of_hidden[::2], *of_hidden[1::2], *of_log_std]
    gradients += [torch.bmm(score.mT, top_SKMH[:, 0]), score.sum(1)]
    gradients += [torch.bmm(of_value_SM1.mT, top_SKMH[:, -1]), of_value_SM1.sum(1)]
    metrics: list[dict[str, Tensor]] = [{} for _ in steps]
    for number, step in enumerate(steps):
        if step.report:
            mine = _of_learner(distribution, number)
            found = mine, log_prob_SM[number], value_SM[number], step.batch, step.coefficients
            metrics[number] = report_metrics(*found)
    return gradients, metrics


def _used(batch: Batch) -> dict[str, Tensor]:
    names = ("features", "sample", "log_prob", "advantage", "target")
    return {name: getattr(batch, name) for name in names}


def _per_learner(numbers: Sequence[float | None], device: torch.device) -> Any:
    """Return the common number of all learners, or their numbers as a tensor (S, 1)."""
    if len({*numbers}) == 1:
        return numbers[0]
    return torch.tensor(numbers, dtype=torch.float32, device=device).unsqueeze(1)


def _of_learner(distribution: Any, number: int) -> Distribution:
    """Return the distribution of one learner."""
    if isinstance(distribution, Categorical):
        return Categorical(distribution.log_probs[number])
    return distribution._replace(mean=distribution.mean[number], log_std=distribution.log_std[number, 0])


def acts_together(networks: Sequence[nn.Module]) -> bool:
    """Return whether `act_together` supports these networks: plain actor-critics with equal shapes and options."""
    return (
        all(
            isinstance(network, ActorCritic)
            and has_closed_form(network)
            and not network.preprocess.has_inputs
            and all(p.device.type == "cpu" for p in network.parameters())
            for network in networks
        )
        and len({_form(network) for network in networks}) == 1
    )


@torch.no_grad()
def act_together(
    networks: Sequence[Any], x_SNF: Tensor, generators: Sequence[torch.Generator | None]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Sample actions (S, N, ...) of several actor-critics, each with its generator, or greedily if it is None.

    Returns them with the extras `value`, `log_prob` and, if it differs from the action, `sample`; (S, N, ...).
    """
    parameters, head = _stacked(networks), networks[0].policy_head
    top_SKNH, _ = _forward(parameters, x_SNF, networks[0].hidden.activation)
    distribution, value_SN = _heads(parameters, head, top_SKNH)
    drawn = {i: _of_learner(distribution, i).noise(one) for i, one in enumerate(generators) if one is not None}
    unused = next(iter(drawn.values()))
    noise = [drawn.get(number, unused) for number in range(len(generators))]
    sample = distribution.sample_from(torch.stack(noise))
    for number, generator in enumerate(generators):
        if generator is None:
            sample[number] = _of_learner(distribution, number).mode()
    action = head.to_action(distribution, sample)
    extras = {"value": value_SN, "log_prob": distribution.log_prob(sample)}
    return action, extras if sample is action else extras | {"sample": sample}
