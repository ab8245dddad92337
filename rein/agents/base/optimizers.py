"""Optimizers: Adam, gradient clipping and steps, learning rates."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from rein.agents.base.finite import FiniteUpdate
from rein.ops.statistics import clip_by_norm_, global_norm
from rein.schedules import Schedule


class Adam:
    """Adam (Kingma & Ba 2015), the default optimizer of agents.

    Computes the same numbers as `torch.optim.Adam(fused=True)`, whose construction imports torch's compiler and takes
    longer than short runs.
    """

    def __init__(
        self,
        parameters: Iterable[Tensor],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        """`weight_decay` is an L2 penalty on the gradient, as in `torch.optim.Adam`."""
        parameters = list(parameters)
        self.param_groups = [{"params": parameters, "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}]
        self._parameters = parameters
        self._means = [torch.zeros_like(p) for p in parameters]
        self._squares = [torch.zeros_like(p) for p in parameters]
        # one number per parameter in one tensor, so that one operation counts all steps
        device = parameters[0].device if parameters else "cpu"
        self._count = torch.zeros(len(parameters), dtype=torch.float32, device=device)
        self._steps = list(self._count.unbind())

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter that has a gradient."""
        group = self.param_groups[0]
        kept = self._parameters, self._means, self._squares, self._steps
        gradients = [laid_out_as(p, p.grad) for p in self._parameters if p.grad is not None]
        if not gradients:
            return
        if len(gradients) == len(self._parameters):
            parameters, means, squares, steps = kept
            self._count += 1.0
        else:
            rows = [row for row in zip(*kept, strict=True) if row[0].grad is not None]
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
        return {"means": list(self._means), "squares": list(self._squares), "steps": list(self._steps)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned. Raises ValueError if it belongs to other parameters."""
        for name, mine in (("means", self._means), ("squares", self._squares), ("steps", self._steps)):
            theirs = state[name]
            if len(theirs) != len(mine):
                raise ValueError(f"the optimizer has {len(theirs)} {name} in the state and {len(mine)} here")
            for index, (mine_i, theirs_i) in enumerate(zip(mine, theirs, strict=True)):
                if mine_i.shape != theirs_i.shape:
                    there, here = tuple(theirs_i.shape), tuple(mine_i.shape)
                    raise ValueError(f"{name}.{index} of the optimizer is {there} in the state and {here} here")
            for mine_i, theirs_i in zip(mine, theirs, strict=True):
                mine_i.copy_(theirs_i)


def laid_out_as(parameter: Tensor, gradient: Tensor) -> Tensor:
    """Return the gradient with the memory layout of the parameter.

    Fused optimizers of torch 2.13 ignore strides, so a gradient in channels-last layout would update the wrong weights.
    `backward` converts the layout; `torch.autograd.grad` does not.
    """
    if (gradient.is_contiguous() and parameter.is_contiguous()) or gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter).copy_(gradient)


Guard = Callable[[Mapping[str, Tensor], list[Tensor]], bool]  # (metrics, gradients) -> whether to take the step


class Optimizer(Protocol):
    """What agents use of an optimizer: any of `torch.optim`, or `rein.agents.base.optimizers.Adam`."""

    param_groups: list[dict[str, Any]]

    def step(self) -> Any:
        """Change the parameters by their gradients."""
        ...

    def zero_grad(self) -> Any:
        """Clear the gradients."""
        ...

    def state_dict(self) -> Any:
        """What comes back at a resume."""
        ...

    def load_state_dict(self, state: Any) -> Any:
        """Take over what `state_dict` gave."""
        ...


OptimizerFactory = Callable[[Iterable[Tensor]], Optimizer]


def default_optimizer(parameters: Iterable[Tensor]) -> Optimizer:
    """Adam with the epsilon that policy-gradient methods are tuned with (1e-5, Huang et al. 2022)."""
    return Adam(parameters, eps=1e-5)


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

    `guard(metrics, gradients)` decides whether to take the step. Without a guard, `finite` checks the losses and the
    norm. Returns the norm before clipping, or None if neither `measure`, `max_grad_norm` nor `guard` asks for it.
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
    if guard is None or _decided(guard({**metrics, "grad_norm": norm}, gradients)):
        optimizer.step()
    optimizer.zero_grad()
    return norm if measure else None


def _decided(answer: Any) -> bool:
    if answer is None:  # otherwise every update would be left out without a word
        raise TypeError("guard returned None; return True to take the step, or False to leave it out")
    return bool(answer)


def check_optimizer(optimizer: Optimizer) -> None:
    """Raise ValueError if `optimizer.step` needs a closure, as that of LBFGS does."""
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is closure.empty:
        raise ValueError(
            f"optimizer: {type(optimizer).__name__} evaluates the loss several times in a step, and rein computes each "
            "gradient once; use an optimizer such as torch.optim.Adam"
        )


def set_learning_rate(optimizer: Optimizer, learning_rate: float) -> None:
    """For all parameters from now on."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate


def check_learning_rate(optimizer: Optimizer, option: str, rates: Mapping[str, Schedule]) -> None:
    """ValueError for an optimizer that was given a rate, which `set_learning_rate` would replace by the option's.

    One is taken for given that is neither the default of the optimizer's class nor a value that one of `rates` takes,
    the option's and its kin: whoever gave both knows of it.
    """
    known = inspect.signature(type(optimizer)).parameters.get("lr")
    if known is None:  # nobody can tell
        return
    spans = [schedule.bounds for schedule in rates.values()]
    for given in (group["lr"] for group in optimizer.param_groups if "lr" in group):
        if given != known.default and not any(low * (1 - 1e-6) <= given <= high * (1 + 1e-6) for low, high in spans):
            low, high = rates[option].bounds
            instead = f"{option}={low:g}" if low == high else f"the schedule {option}"
            raise ValueError(
                f"optimizer: its learning rate of {given:g} would be replaced at every update by {instead}: "
                f"give {option}={given:g}"
            )


def describe_optimizer(optimizer: Optimizer) -> dict[str, Any]:
    """Which one it is and what it was built with, but for the learning rate, as JSON."""
    group = {name: value for name, value in optimizer.param_groups[0].items() if name not in ("params", "lr")}
    plain = {name: list(value) if isinstance(value, tuple) else value for name, value in group.items()}
    settings = {name: value for name, value in plain.items() if isinstance(value, list | float | int | str)}
    return {"type": f"{type(optimizer).__module__}.{type(optimizer).__qualname__}", **settings}
