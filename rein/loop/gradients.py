"""Gradients that parameters hold when a state is saved, so that accumulation over iterations resumes exactly."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterable, Iterator, Mapping
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rein.loop.unowned import attributes

_LIMIT = 10_000  # objects visited inside a part; larger parts are data
_PLAIN = (str, bytes, int, float, complex, type(None), type, ModuleType, FunctionType)
_PLAIN += (np.ndarray, np.generic, torch.Generator, torch.device)


def save_gradients(parts: Mapping[str, Any]) -> dict[str, dict[str, Tensor]]:
    """Return the gradients of all parameters that the parts hold, by part and by path; parameters without one left out.

    Sparse gradients become dense. A parameter that several parts share is saved once.
    """
    seen: set[int] = set()
    saved: dict[str, dict[str, Tensor]] = {}
    for name, part in parts.items():
        for path, parameter in _parameters(part):
            if parameter.grad is not None and id(parameter) not in seen:
                gradient = parameter.grad.detach()
                saved.setdefault(name, {})[path] = gradient.to_dense() if gradient.is_sparse else gradient
            seen.add(id(parameter))
    return saved


def load_gradients(parts: Mapping[str, Any], saved: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Give the parameters the saved gradients, and all others none. Raises ValueError for an unknown parameter."""
    found = {name: dict(_parameters(part)) for name, part in parts.items()}
    for name, parameters in found.items():
        if unknown := sorted(saved.get(name, {}).keys() - parameters.keys()):
            raise ValueError(
                f"the state has gradients of {', '.join(unknown)} of the part {name!r}, which has no such parameters: "
                "build the part as in the saved run"
            )
        for parameter in parameters.values():
            parameter.grad = None
    for name, gradients in saved.items():
        for path, gradient in gradients.items():
            parameter = found[name][path]
            parameter.grad = gradient.to(parameter.device, parameter.dtype, copy=True)


def _parameters(part: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters of all modules and optimizers that a part is or holds, with their paths; nearest first.

    Of rein's own parts, only the attributes are visited: they keep no gradient between iterations, but a step of the
    user's may do so with the networks of an agent.
    """
    flat = type(part).__module__.startswith("rein.")
    seen: set[int] = set()
    waiting = collections.deque([("", part)])
    while waiting and len(seen) < _LIMIT:
        path, value = waiting.popleft()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            if value.requires_grad and value.is_leaf:
                yield path, value
        elif isinstance(value, nn.Module):
            yield from ((_join(path, name), parameter) for name, parameter in value.named_parameters())
        elif value is part or not flat:
            children = itertools.islice(_children(value), _LIMIT)
            waiting.extend((_join(path, name), child) for name, child in children if not isinstance(child, _PLAIN))


def _children(value: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(value, torch.optim.Optimizer):
        return [("param_groups", value.param_groups)]
    if isinstance(value, Mapping):
        return value.items()
    if isinstance(value, list | tuple | collections.deque):
        return enumerate(value)
    return attributes(value).items()


def _join(path: str, name: Any) -> str:
    return f"{path}.{name}" if path else str(name)
