"""The one place where an agent's parameters change: gradients in, a step of the optimizer out."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from rein.learning.adam import Adam
from rein.learning.finite import FiniteUpdate
from rein.ops.statistics import clip_by_norm_, global_norm
from rein.ops.trees import map_tree
from rein.schedules import Schedule

Guard = Callable[[Mapping[str, Tensor], list[Tensor]], bool]  # (metrics, gradients) -> whether to take the step


class Optimizer(Protocol):
    """What agents use of an optimizer: any of `torch.optim`, or `rein.learning.adam.Adam`."""

    param_groups: list[dict[str, Any]]

    def step(self) -> Any:
        """Change the parameters by their gradients."""
        ...

    def zero_grad(self) -> Any:
        """Forget the gradients."""
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


def plain_state(optimizer: Optimizer) -> dict[str, Any]:
    """The optimizer's state with string keys and lists, so that a checkpoint can hold it without pickle."""
    state = optimizer.state_dict()
    if isinstance(optimizer, Adam):
        return state
    groups = [
        {name: list(value) if isinstance(value, tuple) else value for name, value in group.items()}
        for group in state["param_groups"]
    ]
    return {"state": {str(index): dict(kept) for index, kept in state["state"].items()}, "param_groups": groups}


def load_plain_state(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """The inverse of `plain_state`."""
    if isinstance(optimizer, Adam):
        optimizer.load_state_dict(state)
        return
    mine = optimizer.state_dict()["param_groups"]
    groups = [
        {name: tuple(value) if isinstance(own.get(name), tuple) else value for name, value in group.items()}
        for group, own in zip(state["param_groups"], mine, strict=True)
    ]
    kept = {int(index): map_tree(_copied, value) for index, value in state["state"].items()}  # torch keeps some
    optimizer.load_state_dict({"state": kept, "param_groups": groups})


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
