"""Events: functions attached in order, filtered, and called with the state. The only file that imports blinker.

Handlers may change the run: they are called one after the other in the order of attachment, each is held strongly, and
what one raises ends the run. Observers must not: they hang on a blinker signal, are called after the handlers, and one
that raises is reported once and disconnected.

Wiring is what a loop is composed with, by `training_loop` for example. It runs before the handlers, or after them with
`last=True`. It is not listed, and it cannot be muted or detached.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, MutableSet
from typing import Any, TypeVar, overload

import attrs
import blinker

from rein.loop.checks import check_function, name_of, same
from rein.loop.filters import Filter, Gate, make_filter, make_gate
from rein.loop.state import Handler, State

logger = logging.getLogger("rein")

F = TypeVar("F", bound=Callable[..., Any])


class _OrderedSet(MutableSet):
    """A set that iterates in order of insertion: blinker's own order changes from run to run."""

    def __init__(self, values: Iterable[Any] = ()) -> None:
        self._values = dict.fromkeys(values)

    def __contains__(self, value: object) -> bool:
        return value in self._values

    def __iter__(self) -> Iterator[Any]:
        return iter(tuple(self._values))

    def __len__(self) -> int:
        return len(self._values)

    def add(self, value: Any) -> None:
        self._values[value] = None

    def discard(self, value: Any) -> None:
        self._values.pop(value, None)

    remove = discard

    def update(self, values: Iterable[Any]) -> None:
        self._values.update(dict.fromkeys(values))

    def copy(self) -> _OrderedSet:
        return _OrderedSet(self._values)


class _Signal(blinker.Signal):
    set_class = _OrderedSet  # type: ignore[assignment]  # blinker says `set`, and uses no more than this has


class Postponed(Exception):
    """Raised by a handler that an interrupt cut short: the next run calls that handler again, and those after it.

    Only the loop's own events can be postponed, see `rein.loop.engine.POSTPONES`.
    """

    def __init__(self, handle: Handle) -> None:
        super().__init__(f"{handle.key} was interrupted")
        self.event, self.key = handle.event.name, handle.key


@attrs.define(eq=False)
class Handle:
    """One attachment of a function to an event; `detach()` takes it off again."""

    event: Event
    function: Handler
    filter: Filter | None
    key: str  # where in state.counts its filter remembers
    gate: Gate | None  # None where a modulus of the event's own count says it all

    def detach(self) -> None:
        """Take the function off its event; nothing happens when it is off already."""
        self.event.remove(self)


class Event:
    """Something that happens in a loop: call it to decorate a handler, with or without filters.

        @loop.epoch_ended(every=10)
        def report(state): ...

    `calls` is what firing costs: an ordered tuple of callables, empty when nobody listens.
    """

    def __init__(self, name: str, owner: object, state: State, count: Callable[[State], int] | None = None) -> None:
        """`owner` is the sender that observers see; `count` replaces the event's own count where the loop keeps one."""
        self.name = name
        self.calls: tuple[Handler, ...] = ()
        self.listened_to = False  # whether anything is attached, though it be muted
        self._owner = owner
        self._state = state
        self._count = count
        self._handles: tuple[Handle, ...] = ()
        self._first: tuple[Handler, ...] = ()  # wiring that runs before the handlers
        self._last: tuple[Handler, ...] = ()  # wiring that runs after them
        self._gated: tuple[tuple[Handler, int, Gate | None], ...] = ()
        self._observed = False
        self._signal: blinker.Signal | None = None
        self._muted = 0

    @overload
    def __call__(self, function: F) -> F: ...
    @overload
    def __call__(self, **filters: Any) -> Callable[[F], F]: ...
    def __call__(self, function: Any = None, **filters: Any) -> Any:
        """Attach a handler, as a decorator: it returns the function itself, so decorators stack.

        Filters, all given must hold: `every=n`, `once=n`, `before=n`, `after=n`, `when=predicate(state)`, counted on
        `unit` (the event's own count by default, a clock, or "iteration" for the count within the epoch).
        """
        if function is not None:
            self.attach(function, **filters)
            return function
        make_filter(self.name, **filters)  # nonsense fails here, where it is written

        def decorate(function: F) -> F:
            self.attach(function, **filters)
            return function

        return decorate

    def attach(self, function: Handler, **filters: Any) -> Handle:
        """Attach a handler and return the handle that detaches it. Filters as in `__call__`."""
        check_function(self.name, "handler", function)
        filter = make_filter(self.name, **filters)
        key = self._free_key(name_of(function))
        handle = Handle(self, function, filter, key, self._gate(filter, key))
        self._handles = (*self._handles, handle)
        self._rebuild()
        return handle

    def detach(self, function: Handle | Handler) -> None:
        """Detach by handle or by function (every attachment of it). Raises ValueError if it is not attached."""
        found = [h for h in self._handles if h is function or same(h.function, function)]
        if not found:
            raise ValueError(f"{self.name}: {name_of(function)} is not attached")
        for handle in found:
            handle.detach()

    def wire(self, function: F, *, last: bool = False) -> F:
        """Attach a function that the loop itself depends on, before all handlers or, with `last`, after them.

        It is not listed in `handlers`, and it cannot be muted, filtered or detached. `last` functions run even if a
        handler raised.
        """
        check_function(self.name, "handler", function)
        if last:
            self._last = (*self._last, function)
        else:
            self._first = (*self._first, function)
        self._rebuild()
        return function

    def observe(self, function: F) -> F:
        """Call `function(loop, state=state)` after the handlers; it watches and must change nothing.

        What it raises is logged once, and it is disconnected.
        """
        if not callable(function):
            raise TypeError(f"{self.name}: an observer is called with (loop, state=state); it is no function")
        if self._signal is None:
            self._signal = _Signal(self.name)
        signal = self._signal

        def guarded(owner: object, state: State) -> None:
            try:
                function(owner, state=state)
            except Exception:  # of an observer, which must not end the run
                logger.exception("observer %s of %s failed and is disconnected", name_of(function), self.name)
                signal.disconnect(guarded)
                self._rebuild()

        signal.connect(guarded, weak=False)
        self._rebuild()
        return function

    @property
    def handlers(self) -> tuple[Handler, ...]:
        """The attached functions in the order of their calls, without the wiring."""
        return tuple(handle.function for handle in self._handles)

    @property
    def wiring(self) -> tuple[Handler, ...]:
        """The functions that the loop itself depends on, see `wire`."""
        return (*self._first, *self._last)

    def fire(self, state: State) -> None:
        """Count this firing and call everything attached. What a handler raises gets a note that says where."""
        if self._count is None:
            state.counts[self.name] = state.counts.get(self.name, 0) + 1
        call = None
        try:
            for call in self.calls:
                if call(state) is not None:
                    self.reject(call)
        except BaseException as error:  # gets a note, raised again
            self.annotate(error, call, state)
            raise

    def reject(self, function: object) -> None:
        """Refuse what a handler returned."""
        raise TypeError(
            f"handler {name_of(function)} on {self.name} must return None; "
            "assign to the state, or ask with state.halt_epoch() and state.halt_loop()"
        )

    def annotate(self, error: BaseException, call: object, state: State) -> None:
        """Add to an exception which handler raised it, and when."""
        if call != self._dispatch:  # which has added its own
            where = f"epoch {state.epoch}, iteration {state.iteration}"
            error.add_note(f"in handler {name_of(call)} on {self.name}, {where}")
            if isinstance(error, AttributeError) and str(error).startswith("'State' object has no attribute"):
                error.add_note("values of your own go into state.memory, which is saved with the run")

    def _dispatch(self, state: State) -> None:
        """Call everything, if a handler is filtered, or if something runs after the handlers."""
        self._call(self._gated, state)

    def go_on(self, key: str, state: State, *, wired: bool) -> None:
        """Finish a firing that was postponed: call the handler with this key, and those after it.

        The firing is not counted again. `wired` calls the wiring again as well.
        """
        keys = [handle.key for handle in self._handles]
        if key not in keys:
            logger.warning("%s was interrupted, and is not attached any more; it is left out", key)
            return
        first, rest = keys.index(key), self._entries(self._handles[keys.index(key) + 1 :])
        again = tuple((function, 0, None) for function in self._first) if wired else ()
        self._call((*again, (self._handles[first].function, 0, None), *rest), state)

    def _call(self, entries: tuple[tuple[Handler, int, Gate | None], ...], state: State) -> None:
        count = state.counts.get(self.name, 0) if self._count is None else self._count(state)
        function, last, observed = None, self._last, self._observed
        try:
            for function, modulus, gate in entries:
                if modulus:
                    if count % modulus:
                        continue
                elif gate is not None and not gate(state, count):
                    continue
                if function(state) is not None:
                    self.reject(function)
        except BaseException as error:  # gets a note, raised again
            observed = observed and not isinstance(error, Postponed)  # the next run finishes this firing
            self.annotate(error, function, state)
            raise
        finally:  # a display must hear of an end also when a handler raised there
            for wired in last:
                wired(state)
            if observed and self._signal is not None:
                self._signal.send(self._owner, state=state)

    def _free_key(self, name: str) -> str:
        """By event, order of attachment and name: the nth handler of that name on this event."""
        taken = {handle.key for handle in self._handles}
        return next(key for n in range(len(taken) + 1) if (key := f"{self.name}/{name}/{n}") not in taken)

    def remove(self, handle: Handle) -> None:
        """Take one attachment off; nothing happens when it is off already."""
        if handle in self._handles:
            self._handles = tuple(h for h in self._handles if h is not handle)
            self._state.counts.pop(handle.key, None)
            self._rebuild()

    def recount(self) -> None:
        """A state was loaded: filters go on as it says; one that it does not know counts from its clocks on."""
        for handle in self._handles:
            handle.gate = self._gate(handle.filter, handle.key)
        self._rebuild()

    def _gate(self, filter: Filter | None, key: str) -> Gate | None:
        if filter is None or filter.never or filter.modulus:
            return None
        return make_gate(filter, key, self._state)

    def mute(self, by: int) -> None:
        """Call no handler and no observer while muted more often than unmuted; firings are counted all the same."""
        self._muted += by
        if self._muted == 0:  # what clocks crossed meanwhile was muted too, and is not made up for
            for handle in self._handles:
                self._state.counts.pop(handle.key, None)
            self.recount()
        self._rebuild()

    def _entries(self, handles: Iterable[Handle]) -> tuple[tuple[Handler, int, Gate | None], ...]:
        heard = [h for h in handles if h.filter is None or not h.filter.never]
        return tuple((h.function, h.filter.modulus if h.filter else 0, h.gate) for h in heard)

    def _rebuild(self) -> None:
        heard = () if self._muted else self._entries(self._handles)
        self._gated = (*((function, 0, None) for function in self._first), *heard)
        receivers = self._signal is not None and bool(self._signal.receivers)
        self._observed = receivers and not self._muted
        if self._last or self._observed or any(modulus or gate for _, modulus, gate in heard):
            self.calls = (self._dispatch,)
        else:
            self.calls = tuple(function for function, _, _ in self._gated)
        self.listened_to = receivers or bool(self._handles or self._first or self._last)

    def __repr__(self) -> str:
        return f"Event({self.name!r}, handlers=[{', '.join(name_of(f) for f in self.handlers)}])"
