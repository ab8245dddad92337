"""Filters of handlers: `every`, `once`, `before`, `after` and `when`, counted on a named clock.

A filter on the event's own count depends only on that count. A filter on a clock that advances by more than one detects
*crossings*: every=100 fires at 128 when the clock goes 64, 128. Its memory, the last clock value, is in `state.counts`,
so that a resumed run keeps its schedule.
"""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Callable
from typing import Any

import attrs

from rein.loop.checks import check_function
from rein.loop.state import CLOCKS, State

UNITS = ("iteration", *CLOCKS)

Gate = Callable[[State, int], bool]


class _NotGiven:
    def __repr__(self) -> str:
        return "not given"


NOT_GIVEN: Any = _NotGiven()


@attrs.frozen
class Filter:
    """Conditions of one attachment. All given conditions must hold."""

    event: str
    every: float | None = NOT_GIVEN
    once: float = NOT_GIVEN
    before: float = NOT_GIVEN
    after: float = NOT_GIVEN
    when: Callable[[State], Any] | None = None
    unit: str | None = None

    @property
    def never(self) -> bool:
        """Whether the handler never runs: `every=0` or `every=None`."""
        return self.every is not NOT_GIVEN and not self.every

    @property
    def modulus(self) -> int:
        """n if `every=n` on the event's own count is the only condition, else 0."""
        rest = (self.once, self.before, self.after)
        simple = self.every is not NOT_GIVEN and self.unit is None and self.when is None
        return int(self.every or 0) if simple and all(value is NOT_GIVEN for value in rest) else 0

    def __str__(self) -> str:
        conditions = [(name, getattr(self, name)) for name in ("every", "once", "before", "after", "when", "unit")]
        absent = {"when": None, "unit": None}
        parts = [f"{name}={value!r}" for name, value in conditions if value is not absent.get(name, NOT_GIVEN)]
        return f"{self.event}({', '.join(parts)})"


def make_filter(event: str, **conditions: Any) -> Filter | None:
    """Check the arguments of `loop.<event>(...)`. Returns None without filters. Raises TypeError or ValueError."""
    names = ("every", "once", "before", "after", "when", "unit")
    for name in conditions:
        if name not in names:
            raise TypeError(f"{event}({name}=...): unknown filter; the filters are {', '.join(names)}")
    filter = Filter(event, **conditions)
    if filter.unit is not None and filter.unit not in UNITS:
        raise ValueError(f"{filter}: unknown unit {filter.unit!r}; the units are {', '.join(UNITS)}")
    if filter.when is not None:
        check_function(str(filter), "predicate", filter.when)
    counts = {name: _checked(filter, name) for name in ("every", "once", "before", "after") if name in conditions}
    if filter.unit is not None and not counts:
        raise ValueError(f"{filter}: `unit` needs one of every, once, before and after")
    return attrs.evolve(filter, **counts) if counts or filter.when is not None else None


def _checked(filter: Filter, name: str) -> float | None:
    """Return the given number, as an int unless the unit is seconds."""
    value = getattr(filter, name)
    if name == "every" and value is None:
        return None
    if not _is_number(value):
        raise TypeError(f"{filter}: `{name}` must be a number, got {value!r}")
    if filter.unit != "seconds" and value != int(value):
        raise ValueError(f"{filter}: `{name}` counts whole {filter.unit or 'firings'}; give an integer")
    if value < 0 or (name == "once" and value == 0):
        least = {"every": "1 or more, or 0 for never", "once": "more than 0"}.get(name, "0 or more")
        raise ValueError(f"{filter}: `{name}` must be {least}, got {value}")
    return float(value) if filter.unit == "seconds" else int(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)


def _reader(filter: Filter) -> Callable[[State], float] | None:
    """Return a function that reads the filter's unit from the state; None for the event's own count."""
    if filter.unit is None:
        return None
    if filter.unit != "iteration":
        return operator.attrgetter(f"clocks.{filter.unit}")
    # the count within the epoch includes the current firing, as an event's own count does
    if filter.event == "iteration_started":
        return lambda state: state.iteration + 1
    return operator.attrgetter("iteration")


def make_gate(filter: Filter, key: str, state: State) -> Gate:
    """Return a function of (state, own count) that returns whether the handler runs now.

    `key` is the entry of `state.counts` for the memory of a filter on a clock. An existing entry (a resume) is kept.
    """
    read = _reader(filter)
    if read is not None and not (filter.every is NOT_GIVEN and filter.once is NOT_GIVEN):
        state.counts.setdefault(key, [state.epoch, state.iteration] if filter.unit == "iteration" else read(state))
    crossing, bound, when = _crossing(filter, read, key, state), _bound(filter, read), filter.when
    if crossing is not None and bound is None and when is None:
        return crossing

    def opens(state: State, count: int) -> bool:
        # check crossings first: a crossing that another condition rejects is used up
        return (
            (crossing is None or crossing(state, count))
            and (bound is None or bound(state, count))
            and (when is None or bool(when(state)))
        )

    return opens


def _bound(filter: Filter, read: Callable[[State], float] | None) -> Gate | None:
    before = float("inf") if filter.before is NOT_GIVEN else filter.before
    after = -float("inf") if filter.after is NOT_GIVEN else filter.after
    if before == float("inf") and after == -float("inf"):
        return None

    def within(state: State, count: int) -> bool:
        return after < (count if read is None else read(state)) < before

    return within


def _crossing(filter: Filter, read: Callable[[State], float] | None, key: str, state: State) -> Gate | None:
    every = None if filter.every is NOT_GIVEN else filter.every
    once = None if filter.once is NOT_GIVEN else filter.once
    if every is None and once is None:
        return None
    if read is None:
        return lambda state, count: (every is None or count % every == 0) and (once is None or count == once)

    # also kept here: a handler detached or muted while the event fires still runs in this firing
    last: Any = state.counts[key]

    def crosses(state: State, count: int) -> bool:
        nonlocal last
        seen, last = last, read(state)
        if key in state.counts:
            state.counts[key] = last
        return (every is None or last // every > seen // every) and (once is None or seen < once <= last)

    def crosses_in_epoch(state: State, count: int) -> bool:
        nonlocal last
        (epoch, seen), last = last, [state.epoch, read(state)]
        if key in state.counts:
            state.counts[key] = last
        value, seen = last[1], seen if epoch == state.epoch else 0
        return (every is None or value // every > seen // every) and (once is None or seen < once <= value)

    if filter.unit == "iteration":
        return crosses_in_epoch
    return crosses if once is not None else _multiples(filter, read, key, state)


def _multiples(filter: Filter, read: Callable[[State], float], key: str, state: State) -> Gate:
    """Return the gate of a plain every=n on a clock. It is optimized for the hot path."""
    every: Any = filter.every
    held = operator.attrgetter(f"clocks._{filter.unit}") if filter.unit in CLOCKS[:4] else read
    due = (state.counts[key] // every + 1) * every

    def crosses(state: State, count: int) -> bool:
        nonlocal due
        value = held(state)
        if held is not read and type(value) is not int:
            value = read(state)  # fetches a tensor
        if value < due:
            return False
        if key in state.counts:  # absent after a detach while the event fires
            state.counts[key] = value
        due = (value // every + 1) * every
        return True

    return crosses
