"""Optimizers: Adam, gradient clipping, optimizer steps, learning rates, and checks that updates are finite."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from rein.errors import NonFiniteError
from rein.ops.statistics import clip_by_norm_, global_norm
from rein.ops.trees import Read, compact
from rein.schedules import Schedule


class Adam:
    """Adam (Kingma & Ba 2015), the default optimizer of agents.

    Equivalent to `torch.optim.Adam(fused=True)`, but much faster to construct, since torch's class imports the
    compiler.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        """Create an optimizer. `weight_decay` is an L2 penalty, as in `torch.optim.Adam`."""
        parameters = list(parameters)
        self.param_groups = [{"params": parameters, "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}]
        self._parameters = parameters
        self._means = [torch.zeros_like(p) for p in parameters]
        self._squares = [torch.zeros_like(p) for p in parameters]
        # a single tensor with one count per parameter, so that one operation increments all counts
        device = parameters[0].device if parameters else "cpu"
        self._count = torch.zeros(len(parameters), dtype=torch.float32, device=device)
        self._steps = list(self._count.unbind())

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter that has a gradient."""
        group = self.param_groups[0]
        columns = self._parameters, self._means, self._squares, self._steps
        gradients = [laid_out_as(p, p.grad) for p in self._parameters if p.grad is not None]
        if not gradients:
            return
        if len(gradients) == len(self._parameters):
            parameters, means, squares, steps = columns
            self._count += 1.0
        else:
            rows = [row for row in zip(*columns, strict=True) if row[0].grad is not None]
            parameters, means, squares, steps = (list(column) for column in zip(*rows, strict=True))
            torch._foreach_add_(steps, 1.0)
        torch._fused_adam_(
            parameters,
            gradients,
            means,
            squares,
            [],
            steps,
            lr=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
        )

    def zero_grad(self) -> None:
        """Clear the gradients."""
        for parameter in self._parameters:
            parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Return the moments and the number of steps."""
        means, squares = ([*map(compact, moments)] for moments in (self._means, self._squares))
        return {"means": means, "squares": squares, "steps": list(compact(self._count).unbind())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that `state_dict` returned. Raises ValueError if the number or shapes of parameters differ."""
        for name, own in (("means", self._means), ("squares", self._squares), ("steps", self._steps)):
            saved = state[name]
            if len(saved) != len(own):
                raise ValueError(f"the optimizer state has {len(saved)} {name}, this optimizer has {len(own)}")
            for index, (own_i, saved_i) in enumerate(zip(own, saved, strict=True)):
                if own_i.shape != saved_i.shape:
                    there, here = tuple(saved_i.shape), tuple(own_i.shape)
                    raise ValueError(f"{name}.{index} of the optimizer: shape {there} in the state, {here} here")
            for own_i, saved_i in zip(own, saved, strict=True):
                own_i.copy_(saved_i)


def laid_out_as(parameter: Tensor, gradient: Tensor) -> Tensor:
    """Return the gradient in the memory layout of the parameter.

    Fused optimizers of torch 2.13 ignore strides, so a channels-last gradient would update the wrong weights.
    `backward` converts the layout, `torch.autograd.grad` does not.
    """
    if (gradient.is_contiguous() and parameter.is_contiguous()) or gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter).copy_(gradient)


Guard = Callable[[Mapping[str, Tensor], list[Tensor]], bool]  # (metrics, gradients) -> whether to take the step


class Optimizer(Protocol):
    """Protocol of optimizers, such as those of `torch.optim` and `rein.agents.base.optimizers.Adam`."""

    param_groups: list[dict[str, Any]]

    def step(self) -> Any:
        """Update the parameters with their gradients."""

    def zero_grad(self) -> Any:
        """Clear the gradients."""

    def state_dict(self) -> Any:
        """Return the state of the optimizer."""

    def load_state_dict(self, state: Any, /) -> Any:
        """Load a state that `state_dict` returned."""


OptimizerFactory = Callable[[Iterable[Tensor]], Optimizer]


def apply_gradients(
    optimizer: Optimizer,
    metrics: Mapping[str, Tensor],
    *,
    max_grad_norm: float | None,
    guard: Guard | None = None,
    measure: bool = True,
    finite: FiniteUpdate | None = None,
) -> Tensor | None:
    """Clip gradients by their global norm, step the optimizer and clear the gradients.

    If `guard(metrics, gradients)` returns False, the step is skipped. Without a guard, `finite` checks the losses and
    the norm. Returns the norm before clipping, or None if `measure`, `max_grad_norm` and `guard` are not set.
    """
    measure = measure or max_grad_norm is not None or guard is not None
    if not measure and finite is None:
        optimizer.step()
        optimizer.zero_grad()
        return None
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    with torch.no_grad():
        norm = global_norm(gradients)
        if finite is not None and guard is None:
            finite(metrics, norm)
        if max_grad_norm is not None:
            clip_by_norm_(gradients, norm, max_grad_norm)
    if guard is None or _decision(guard({**metrics, "grad_norm": norm}, gradients)):
        optimizer.step()
    optimizer.zero_grad()
    return norm if measure else None


def _decision(answer: Any) -> bool:
    if answer is None:  # a guard without a return statement would skip every step silently
        raise TypeError("guard returned None; return True to take the step, or False to skip it")
    return bool(answer)


def check_optimizer(optimizer: Optimizer) -> None:
    """Raise ValueError if `optimizer.step` requires a closure, as in LBFGS."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise ValueError(
            f"optimizer: {type(optimizer).__name__} evaluates the loss several times per step, which rein does not "
            "support; use an optimizer such as torch.optim.Adam"
        )


def set_learning_rate(optimizer: Optimizer, learning_rate: float) -> None:
    """Set the learning rate of all parameters."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate


def check_learning_rate(optimizer: Optimizer, option: str, rates: Mapping[str, Schedule]) -> None:
    """Raise ValueError if `set_learning_rate` would replace a learning rate passed to the optimizer.

    The default learning rate of the optimizer class is accepted, and so are rates within the bounds of `rates`.
    """
    declared = inspect.signature(type(optimizer)).parameters.get("lr")
    if declared is None:
        return
    ranges = [schedule.bounds for schedule in rates.values()]
    for rate in (group["lr"] for group in optimizer.param_groups if "lr" in group):
        if rate != declared.default and not any(low * (1 - 1e-6) <= rate <= high * (1 + 1e-6) for low, high in ranges):
            low, high = rates[option].bounds
            instead = f"{option}={low:g}" if low == high else f"the schedule {option}"
            raise ValueError(
                f"optimizer: {instead} would replace its learning rate of {rate:g} at every update: "
                f"give {option}={rate:g}"
            )


def describe_optimizer(optimizer: Optimizer) -> dict[str, Any]:
    """Return the type and the settings of an optimizer, except the learning rate, as JSON."""
    group = {name: value for name, value in optimizer.param_groups[0].items() if name not in ("params", "lr")}
    plain = {name: list(value) if isinstance(value, tuple) else value for name, value in group.items()}
    settings = {name: value for name, value in plain.items() if isinstance(value, list | float | int | str)}
    return {"type": f"{type(optimizer).__module__}.{type(optimizer).__qualname__}", **settings}


HINT = (
    "Add rein.handlers.guards.guard_data(loop) to find the data that caused it. If the data is finite, try a smaller "
    "learning rate or max_grad_norm. check_finite=False turns the check off"
)


class FiniteUpdate:
    """Check that raises NonFiniteError if a loss or the gradient norm of a module is NaN or infinite.

    On the CPU, the check runs before the optimizer step. On other devices, a flag is accumulated without
    synchronization, and `reads` checks the flag.
    """

    def __init__(self, networks: nn.Module) -> None:
        self._networks = networks
        self.deferred = False  # whether the CPU also accumulates a flag
        self._flag: Tensor | None = None  # NaN after a non-finite loss or norm; otherwise 0, and changed in place

    def __call__(self, metrics: Mapping[str, Tensor], norm: Tensor) -> None:
        """Check an update before gradients are clipped."""
        if self.deferred or not norm.is_cpu:
            self._flag = torch.zeros_like(norm) if self._flag is None else self._flag
            for value in (norm, *_losses(metrics).values()):
                self._flag += value.mul(0.0)  # 0 * infinity is NaN
            return
        total = float(norm)
        for name, value in metrics.items():
            if "loss" in name and not value.ndim:
                total += float(value)
        if not math.isfinite(total):
            self._search(_losses(metrics), norm)

    def _search(self, losses: Mapping[str, Tensor], norm: Tensor) -> None:
        """Raise NonFiniteError if a value is not finite. Their sum can overflow although all values are finite."""
        problems = [f"{name} is {float(loss)}" for name, loss in losses.items() if not math.isfinite(float(loss))]
        problems += [f"the gradient norm is {float(norm)}"] if not math.isfinite(float(norm)) else []
        named = self._networks.named_parameters()
        wrong = (name for name, p in named if p.grad is not None and not bool(torch.isfinite(p.grad).all()))
        first = next(wrong, None)
        problems += [f"the first non-finite gradient is the gradient of {first}"] if first is not None else []
        if not problems:
            return
        kind = type(self._networks).__name__
        raise NonFiniteError(f"{', '.join(problems)}: this update of {kind} was not applied. {HINT}")

    def clear(self) -> None:
        """Clear the flag, in place, because captured programs change it."""
        if self._flag is not None:
            self._flag.zero_()

    def reads(self) -> Iterator[Read]:
        """Yield the check of the flag, which raises NonFiniteError if it was set since the last check."""
        if self._flag is not None:
            yield [self._flag], self._check

    def _check(self, flag: Tensor) -> None:
        if math.isnan(float(flag)):
            self.clear()
            raise NonFiniteError(
                f"a loss or the gradient norm of {type(self._networks).__name__} was not finite in this epoch. {HINT}"
            )


def _losses(metrics: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value for name, value in metrics.items() if "loss" in name and not value.ndim}
