"""Checks for the arguments of a loop: functions of the state, limits, names of events."""

from __future__ import annotations

import difflib
import functools
import inspect
import keyword
import operator
from collections.abc import Callable, Iterable
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

from rein.ops.trees import signature_drift, tree_signature

if TYPE_CHECKING:
    from rein.loop.state import State

Step = Callable[["State"], Any]


FUNCTIONS = (FunctionType, MethodType, functools.partial)  # not classes and modules, which are values as well


def limit(name: str, value: int | None) -> int | None:
    """Return `value` as an int >= 1, or None for no limit."""
    if value is None:
        return None
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name}={value!r}: give a whole number, or None for no limit") from None
    if isinstance(value, bool) or number < 1:
        raise ValueError(f"{name}={value!r}: give 1 or more, or None for no limit")
    return number


def first_epoch(value: int, last: int | None) -> int:
    """Return the number of the first epoch as an int from 1 to `last`."""
    number = limit("first_epoch", value)
    if number is None or (last is not None and number > last):
        raise ValueError(f"first_epoch={value!r}: give a number from 1 to epochs={last}, the number of the last epoch")
    return number


def event_name(name: str) -> None:
    """Raise ValueError if `name` cannot be written as `@loop.<name>`."""
    if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name):
        raise ValueError(f"define({name!r}): the name of an event must be a Python identifier")


def first_result(first: Any) -> Callable[[State], None]:
    """Return a check for the first edge. It raises TypeError if the step returned something other than a step_state.

    `first` is the first step_state. A step may return it again, even if it is a generator.
    """

    def check_first_result(state: State) -> None:
        result = state.step_state
        if result is state:
            raise TypeError("the step returned the state of the run; return the next step_state, or None")
        if result is not first and (inspect.isgenerator(result) or inspect.iscoroutine(result)):
            kind = type(result).__name__
            raise TypeError(f"the step returned a {kind}, which has not run; return the next step_state")

    return check_first_result


def closest(name: str, event_names: Iterable[str]) -> str:
    """Return a hint for an unknown event name: the closest name, or all names."""
    names = list(event_names)
    near = difflib.get_close_matches(name, names, 1)
    return f"; did you mean {near[0]!r}?" if near else f"; its events are {', '.join(names)}"


def strict(step: Step, of: Callable[[Any], Any] = lambda step_state: step_state) -> Step:
    """Wrap a step: raise TypeError if `of(step_state)` differs in structure from the first one."""
    expected: list[Any] = []

    def strict_step(state: State) -> Any:
        result = step(state)
        signature = tree_signature(of(result))
        if not expected:
            expected.append(signature)
        elif signature != expected[0]:
            raise TypeError(f"strict: step_state drifted: {signature_drift(expected[0], signature)}")
        return result

    strict_step.__qualname__, strict_step.__wrapped__ = name_of(step), step  # type: ignore[attr-defined]
    return strict_step


def name_of(function: object) -> str:
    """Return a readable name for any callable. Partials and callable objects have no `__qualname__`."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__qualname__", None) or type(function).__qualname__


def same(one: object, other: object) -> bool:
    """Return whether two objects are the same function. Two lookups of one method count as the same."""
    return one is other or (hasattr(one, "__self__") and one == other)


def check_runs(where: str, role: str, function: Any) -> None:
    """Raise TypeError if `function` is a class, is not callable, is asynchronous or is a generator function."""
    if isinstance(function, type) or not callable(function):
        got = f"the class {function.__qualname__}" if isinstance(function, type) else type(function).__name__
        raise TypeError(f"{where}: a {role} must be a function of the state, got {got}")
    never_runs = inspect.iscoroutinefunction, inspect.isgeneratorfunction
    if any(test(f) for test in never_runs for f in (function, type(function).__call__)):
        raise TypeError(
            f"{where}: {role} {name_of(function)} is asynchronous or a generator: calling it would run nothing"
        )


def check_function(where: str, role: str, function: Any) -> None:
    """Run `check_runs`, and raise TypeError if `function` cannot be called with the state as its only argument."""
    check_runs(where, role, function)
    try:
        inspect.signature(function, follow_wrapped=False).bind(None)
    except TypeError as error:
        raise TypeError(
            f"{where}: {role} {name_of(function)} cannot be called with the state as its only argument: {error}"
        ) from None
    except ValueError:
        pass  # implemented in C, without a signature
