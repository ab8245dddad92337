"""What a loop would forget: objects with a state that its step and handlers use, and that it does not own."""

from __future__ import annotations

import collections
import functools
import inspect
from collections.abc import Iterable, Iterator, Mapping
from types import FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rein.ops.trees import leaves

if TYPE_CHECKING:
    from rein.loop.loop import Loop

_LIMIT = 100_000  # objects looked at inside the parts; more than that is data


def unowned(loop: Loop) -> list[str]:
    """One line for each stateful object that the step or a handler holds and that is no part of the loop.

    Looked through are closures, bound methods, partials, the globals that a function names, and plain containers of
    these. What is inside a part belongs to it; what has nothing in its state needs no owner.
    """
    owned = _inside(loop.parts.values()) | {id(own) for own in (loop, loop.metrics, loop.state.clocks)}
    found: dict[int, str] = {}
    functions = [("the step", loop.step)]
    functions += [(f"a handler of {e.name}", f) for e in loop.events.values() for f in (*e.wiring, *e.handlers)]
    for _, function in functions:  # what is seeded anew before it is drawn from has nothing to be remembered
        if _seeds(function):
            owned |= {id(value) for _, value in _held(function, set()) if isinstance(value, torch.Generator)}
    for where, function in functions:
        for name, value in _held(function, set()):
            if id(value) not in owned and id(value) not in found and _has_state(value):
                found[id(value)] = f"{type(value).__qualname__} {name!r} in {where}"
    return list(found.values())


def _seeds(function: Any) -> bool:
    code = getattr(getattr(function, "func", function), "__code__", None)
    return code is not None and "manual_seed" in code.co_names


def _has_state(value: Any) -> bool:
    if isinstance(value, torch.Generator):  # torch's own are for `torch_generators`
        return value is not torch.default_generator and value not in torch.cuda.default_generators
    if isinstance(value, type | ModuleType) or not callable(getattr(value, "state_dict", None)):
        return False
    if not callable(getattr(value, "load_state_dict", None)):
        return False
    return any(True for _ in leaves(value.state_dict()))


def _held(function: Any, seen: set[int], name: str = "") -> Iterator[tuple[str, Any]]:
    """What a function can reach by itself, by name."""
    if id(function) in seen:
        return
    seen.add(id(function))
    if isinstance(function, functools.partial):
        yield from _each(("", *function.args), seen)
        yield from _named(function.keywords, seen)
        yield from _held(function.func, seen)
    elif isinstance(function, MethodType):
        yield name or "self", function.__self__
        yield from _named(attributes(function.__self__), seen)
        yield from _held(function.__func__, seen)
    elif isinstance(function, FunctionType):
        if _complete(function):
            variables = inspect.getclosurevars(function)
            yield from _named({**_own_globals(function, variables.globals), **variables.nonlocals}, seen)
        yield from _each(function.__defaults__ or (), seen)
        yield from _named(function.__kwdefaults__ or {}, seen)
    elif isinstance(function, Mapping):
        yield from _named({str(key): value for key, value in function.items()}, seen)
    elif isinstance(function, list | tuple | set | frozenset):
        yield from _each(function, seen)


def _own_globals(function: FunctionType, found: Mapping[str, Any]) -> dict[str, Any]:
    """Without functions of other modules: what those use is not this one's; rein's own have no globals with a state."""
    module = function.__module__ or ""
    if module.partition(".")[0] == "rein":
        return {}
    return {k: v for k, v in found.items() if not isinstance(v, FunctionType) or v.__module__ == module}


def _named(values: Mapping[str, Any], seen: set[int]) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        yield name, value
        yield from _held(value, seen, name)


def _each(values: Iterable[Any], seen: set[int]) -> Iterator[tuple[str, Any]]:
    for value in values:
        yield type(value).__name__, value
        yield from _held(value, seen)


def _complete(function: FunctionType) -> bool:
    """Whether every cell of a closure is filled: one that is not yet cannot be looked into."""
    try:
        for cell in function.__closure__ or ():
            _ = cell.cell_contents
    except ValueError:
        return False
    return True


def _inside(parts: Iterable[Any]) -> set[int]:
    """The ids of everything that the parts are made of, through attributes and plain containers."""
    seen: set[int] = set()
    waiting = collections.deque(parts)
    while waiting and len(seen) < _LIMIT:
        value = waiting.popleft()
        if id(value) in seen or isinstance(value, Tensor | str | int | float | type | ModuleType | FunctionType):
            continue
        seen.add(id(value))
        if isinstance(value, Mapping):
            waiting.extend(value.values())
        elif isinstance(value, list | tuple | set | frozenset | collections.deque):
            waiting.extend(value)
        elif isinstance(value, MethodType):
            waiting.append(value.__self__)
        else:
            waiting.extend(attributes(value).values())
    return seen


def attributes(value: Any) -> dict[str, Any]:
    """Return the attributes that an object has itself, in its dictionary or in slots; properties are not called."""
    found = dict(getattr(value, "__dict__", {}))
    for kind in type(value).__mro__:
        for name in getattr(kind, "__slots__", ()) if not isinstance(getattr(kind, "__slots__", ()), str) else ():
            try:
                found[name] = object.__getattribute__(value, name)
            except AttributeError:
                continue
    return found
