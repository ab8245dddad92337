"""What a loop refuses, each at the earliest line that can know."""

from __future__ import annotations

import difflib
import inspect
import keyword
import operator
from collections.abc import Callable, Iterable
from typing import Any

from rein.loop.functions import name_of
from rein.loop.state import State
from rein.ops.trees import signature_drift, tree_signature

Step = Callable[[State], Any]


def limit(name: str, value: int | None) -> int | None:
    """`value` as an int of 1 or more, or None for no limit."""
    if value is None:
        return None
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name}={value!r}: give a whole number, or None for no limit") from None
    if isinstance(value, bool) or number < 1:
        raise ValueError(f"{name}={value!r}: give 1 or more, or None for no limit")
    return number


def event_name(name: str) -> None:
    """Refuse what could not be written as `@loop.<name>`."""
    if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name):
        raise ValueError(f"define({name!r}): an event's name is a Python identifier")


def first_result(given: Any) -> Callable[[State], None]:
    """Return a check for the first edge. It raises TypeError if the step returned an object that is no step_state.

    `given` is the first step_state. A step may return it again, even if it is a generator.
    """

    def check_first_result(state: State) -> None:
        result = state.step_state
        if result is state:
            raise TypeError("the step returned the state of the run; return the next step_state, or None")
        if result is not given and (inspect.isgenerator(result) or inspect.iscoroutine(result)):
            kind = type(result).__name__
            raise TypeError(f"the step returned a {kind}, which has not run; return the next step_state")

    return check_first_result


def closest(name: str, known: Iterable[str]) -> str:
    """How to go on after an unknown event's name."""
    names = list(known)
    near = difflib.get_close_matches(name, names, 1)
    return f"; did you mean {near[0]!r}?" if near else f"; its events are {', '.join(names)}"


def strict(step: Step, of: Callable[[Any], Any] = lambda step_state: step_state) -> Step:
    """Refuse a step_state that is not shaped as the first one; `of(step_state)` is the part that must not drift."""
    expected: list[Any] = []

    def strict_step(state: State) -> Any:
        result = step(state)
        signature = tree_signature(of(result))
        if not expected:
            expected.append(signature)
        elif signature != expected[0]:
            raise TypeError(f"strict: step_state drifted: {signature_drift(expected[0], signature)}")
        return result

    strict_step.__qualname__ = name_of(step)
    return strict_step
