"""Search for stateful objects that the step or a handler uses but the loop does not own. Checkpoints omit them."""

from __future__ import annotations

import collections
import dis
import functools
import inspect
from collections.abc import Iterable, Iterator, Mapping
from types import FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rein.loop.saving import attributes
from rein.ops.trees import leaves

if TYPE_CHECKING:
    from rein.loop.loop import Loop

_LIMIT = 100_000  # objects visited inside the parts; larger parts are data


def unowned(loop: Loop) -> list[str]:
    """Return one line for each stateful object that the step or a handler uses directly and that no part contains.

    A function uses its closure variables, its defaults, and the global variables that it names. It also uses the
    arguments of a `functools.partial` and the `self` of a bound method. An object with `__call__` uses its attributes.
    Objects that these refer to are not visited.
    """
    owned = _inside(loop.parts.values()) | {id(own) for own in (loop, loop.metrics, loop.state.clocks)}
    functions = [("the step", inspect.unwrap(loop.step))]
    functions += [(f"a handler of {e.name}", f) for e in loop.events.values() for f in (*e.wiring, *e.handlers)]
    used = [(where, name, value, _seeds(f)) for where, f in functions for name, value in _used(f)]
    owned |= {id(value) for *_, value, seeds in used if seeds and isinstance(value, torch.Generator)}
    found: dict[int, str] = {}
    for where, name, value, _ in used:
        if id(value) not in owned and _has_state(value):
            found.setdefault(id(value), f"{type(value).__qualname__} {name!r} in {where}")
    return list(found.values())


def _seeds(function: Any) -> bool:
    """Return whether a function seeds its generators, so that their state need not be saved."""
    code = getattr(getattr(function, "func", function), "__code__", None)
    return code is not None and "manual_seed" in code.co_names


def _has_state(value: Any) -> bool:
    if isinstance(value, torch.Generator):  # `torch_generators` saves torch's own generators
        return value is not torch.default_generator and value not in torch.cuda.default_generators
    if isinstance(value, type | ModuleType):
        return False
    if not all(callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict")):
        return False
    try:
        return any(True for _ in leaves(value.state_dict()))
    except Exception:  # if the state cannot be read, assume that it is not empty
        return True


def _used(function: Any) -> Iterator[tuple[str, Any]]:
    """Yield the objects that a function uses directly, with their names."""
    if isinstance(function, functools.partial):
        yield from ((type(value).__name__, value) for value in function.args)
        yield from function.keywords.items()
        yield from _used(function.func)
    elif isinstance(function, MethodType):
        yield "self", function.__self__
        yield from _used(function.__func__)
    elif isinstance(function, FunctionType):
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                yield name, cell.cell_contents
            except ValueError:  # a variable that is not assigned yet
                continue
        yield from ((type(value).__name__, value) for value in function.__defaults__ or ())
        yield from (function.__kwdefaults__ or {}).items()
        if (function.__module__ or "").partition(".")[0] != "rein":
            yield from ((name, function.__globals__[name]) for name in _globals(function))
    else:  # an object with `__call__`
        yield "self", function
        yield from attributes(function).items()


def _globals(function: FunctionType) -> set[str]:
    """Return the names of the global variables that a function reads. Attribute names are excluded."""
    read = {str(line.argval) for line in dis.get_instructions(function) if line.opname == "LOAD_GLOBAL"}
    return read & function.__globals__.keys()


def _inside(parts: Iterable[Any]) -> set[int]:
    """Return the ids of all objects in the parts, found through attributes and plain containers."""
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
