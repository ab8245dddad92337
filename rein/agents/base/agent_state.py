"""Saving and loading the public attributes of an object."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rein.ops.random import restore
from rein.ops.trees import (
    compact,
    is_namedtuple,
    is_packed,
    load_plain_state,
    map_tree,
    pack,
    plain_state,
    to_device,
    unpack,
)
from rein.types import NAMED_TUPLES

Plain = int | float | str | bool | None

PER_ENVIRONMENT = ("carry", "first_carry", "carry_reset")  # tensors of an agent that are not parameters


def has_state(value: Any) -> bool:
    """Return whether a value is an object (not a class) with `state_dict` and `load_state_dict`."""
    return hasattr(value, "load_state_dict") and not isinstance(value, type)


def public_state(owner: object, skip: Collection[str]) -> dict[str, Any]:
    """Return the attributes that belong to the state, by name. Names with a leading underscore are left out.

    Submodules of other attributes are left out, and objects that two attributes share are returned once. Raises
    TypeError for an attribute that cannot be saved.
    """
    public = {name: value for name, value in vars(owner).items() if not name.startswith("_") and name not in skip}
    inner = {id(m) for value in public.values() if isinstance(value, nn.Module) for m in [*value.modules()][1:]}
    seen: set[int] = set()
    saved = {}
    for name, value in public.items():
        shared = isinstance(value, torch.Generator) or has_state(value)
        if shared and (id(value) in inner or id(value) in seen):
            continue
        seen.add(id(value))
        if callable(value) and not has_state(value):
            continue
        _check(f"{type(owner).__name__}.{name}", value)
        saved[name] = value
    return saved


def _check(path: str, value: Any) -> None:
    if isinstance(value, Plain | Tensor | torch.Generator) or has_state(value):
        return
    if isinstance(value, Mapping):
        for key, part in value.items():
            _check(f"{path}[{key!r}]", part)
    elif isinstance(value, list | tuple):
        for index, part in enumerate(value):
            _check(f"{path}[{index}]", part)
    else:
        raise TypeError(
            f"{path} is {type(value).__name__}, which cannot be saved: add state_dict and load_state_dict to the class "
            "or, to leave the attribute out of the state, start its name with an underscore"
        )


def save_state(value: Any) -> Any:
    """Return the state of a value as dictionaries, lists, tensors and numbers."""
    if isinstance(value, nn.Module):
        return map_tree(compact, dict(value.state_dict()))
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, torch.optim.Optimizer):
        return plain_state(value)  # type: ignore[arg-type]
    if has_state(value):
        return value.state_dict()
    if is_namedtuple(value):
        return pack(value)
    if isinstance(value, Mapping):
        return {key: save_state(part) for key, part in value.items()}
    if isinstance(value, tuple | list):
        return [save_state(part) for part in value]
    return value


def check_state(path: str, value: Any, state: Any) -> None:
    """Raise ValueError if `state` does not fit the type of `value` or, for tensors and modules, its shapes."""
    same = "; build the agent with the same spaces and options"
    if has_state(value) != isinstance(state, Mapping) and (has_state(value) or value is None) and not is_packed(state):
        there, here = ("set" if x is not None else "None" for x in (state, value))
        raise ValueError(f"{path} is {there} in the state, but {here} here{same}")
    if isinstance(value, nn.Module):
        shapes = {name: tuple(x.shape) for name, x in value.state_dict().items()}
        saved_shapes = {name: tuple(x.shape) for name, x in state.items()}
        if differ := sorted(name for name in {*shapes, *saved_shapes} if shapes.get(name) != saved_shapes.get(name)):
            raise ValueError(f"{path}: shapes in the state differ: {', '.join(differ)}{same}")
    elif isinstance(value, Tensor) and isinstance(state, Tensor) and value.shape != state.shape:
        raise ValueError(f"{path} has shape {tuple(state.shape)} in the state, but {tuple(value.shape)} here{same}")


def load_state(value: Any, state: Any, device: torch.device) -> Any:
    """Load a state that `save_state` returned, in place if possible, and return the value."""
    if isinstance(value, torch.Generator):
        restore(value, state)
    elif isinstance(value, torch.optim.Optimizer):
        load_plain_state(value, state)  # type: ignore[arg-type]
    elif has_state(value):
        value.load_state_dict(to_device(state, device))
    elif isinstance(state, Mapping) and is_packed(state):
        return map_tree(lambda leaf: leaf.to(device, copy=True), unpack(state, NAMED_TUPLES))
    elif isinstance(value, Tensor) and isinstance(state, Tensor) and value.shape == state.shape:
        with torch.no_grad():
            value.copy_(state)
    elif isinstance(state, Tensor):
        return state.to(device, copy=True)
    elif isinstance(value, Mapping) and isinstance(state, Mapping):
        return {key: load_state(value.get(key), part, device) for key, part in state.items()}
    elif isinstance(value, list | tuple) and not is_namedtuple(value):
        old = [*value, *[None] * (len(state) - len(value))]
        return type(value)(load_state(a, b, device) for a, b in zip(old, state, strict=False))
    else:
        return state
    return value
