"""Functions of the state that others hand to a loop: their names, whether they do anything, whether two are one."""

from __future__ import annotations

import functools
import inspect
from typing import Any


def name_of(function: object) -> str:
    """A readable name for any callable: partials and callable objects have no `__qualname__`."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__qualname__", None) or type(function).__qualname__


def same(one: object, other: object) -> bool:
    """Whether these are one function: objects that are equal are two, a method looked up twice is one."""
    return one is other or (hasattr(one, "__self__") and one == other)


def check_runs(where: str, role: str, function: Any) -> None:
    """Raises TypeError, where a function is given, for what cannot be called or does nothing when it is."""
    if isinstance(function, type) or not callable(function):
        what = f"the class {function.__qualname__}" if isinstance(function, type) else type(function).__name__
        raise TypeError(f"{where}: a {role} is a function of the state, not {what}")
    never_runs = inspect.iscoroutinefunction, inspect.isgeneratorfunction
    if any(test(f) for test in never_runs for f in (function, type(function).__call__)):
        raise TypeError(f"{where}: {role} {name_of(function)} is asynchronous or yields: called, it would run nothing")


def check_function(where: str, role: str, function: Any) -> None:
    """As `check_runs`; and TypeError for what cannot be called with the state alone."""
    check_runs(where, role, function)
    try:
        inspect.signature(function, follow_wrapped=False).bind(None)
    except TypeError as error:
        raise TypeError(f"{where}: {role} {name_of(function)} cannot be called with the state alone: {error}") from None
    except ValueError:
        pass  # written in C, without a signature
