"""Events: handlers attached in order, optionally filtered, and called with the state. Only this file imports blinker.

Handlers can change the run. They are called in the order of attachment, are held strongly, and end the run if they
raise. Observers must not change the run. They are connected to a blinker signal and called after the handlers; one that
raises is logged once and disconnected.

Wiring is the set of functions that a loop depends on, attached by `training_loop` for example. Wiring runs before the
handlers, or after them with `last=True`. It is not listed and cannot be muted or detached.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, overload

import attrs
import blinker

from rein.loop.checks import check_function, name_of, same
from rein.loop.filters import Filter, Gate, make_filter, make_gate
from rein.loop.state import Handler, State

logger = logging.getLogger("rein")

F = TypeVar("F", bound=Callable[..., Any])


class _OrderedSet(dict[Any, None]):
    """Set that iterates in insertion order. The order of a built-in set changes between runs."""

    def add(self, value: Any) -> None:
        self[value] = None

    def discard(self, value: Any) -> None:
        self.pop(value, None)


class _Signal(blinker.Signal):
    set_class = _OrderedSet  # type: ignore[assignment]  # blinker declares `set`, and uses only these methods


class Postponed(Exception):
    """Raised by a handler that an interrupt cut short. The next run calls that handler again, and those after it.

    Only events of the loop itself can be postponed, see `rein.loop.engine.POSTPONES`.
    """

    def __init__(self, handle: Handle) -> None:
        super().__init__(f"{handle.key} was interrupted")
        self.event, self.key = handle.event.name, handle.key


@attrs.define(eq=False)
class Handle:
    """Attachment of a function to an event. `detach()` removes it."""

    event: Event
    function: Handler
    filter: Filter | None
    key: str  # key in state.counts for the memory of the filter
    gate: Gate | None  # None if a modulus of the event's own count suffices

    def detach(self) -> None:
        """Detach the function from its event. Does nothing if it is already detached."""
        self.event.remove(self)


class Event:
    """Event of a loop. Call it to decorate a handler, with or without filters.

    Example::

        @loop.epoch_ended(every=10)
        def report(state): ...

    `calls` is the ordered tuple of callables that a firing calls. It is empty if nothing is attached.
    """

    def __init__(self, name: str, owner: object, state: State, count: Callable[[State], int] | None = None) -> None:
        """Create an event. Observers receive `owner` as the sender; `count(state)` replaces the event's own count."""
        self.name = name
        self.calls: tuple[Handler, ...] = ()
        self.listened_to = False  # whether anything is attached, even if muted
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
        """Attach a handler as a decorator. Returns the function, so that decorators stack.

        The handler runs if all filters hold: `every=n`, `once=n`, `before=n`, `after=n`, `when=predicate(state)`. They
        count `unit`: a clock, "iteration" (within the epoch), or by default the firings of the event.
        """
        if function is not None:
            self.attach(function, **filters)
            return function
        make_filter(self.name, **filters)  # invalid filters fail here, at the decorator

        def decorate(function: F) -> F:
            self.attach(function, **filters)
            return function

        return decorate

    def attach(self, function: Handler, **filters: Any) -> Handle:
        """Attach a handler and return the handle that detaches it. The filters are those of `__call__`."""
        check_function(self.name, "handler", function)
        filter = make_filter(self.name, **filters)
        key = self._free_key(name_of(function))
        handle = Handle(self, function, filter, key, self._gate(filter, key))
        self._handles = (*self._handles, handle)
        self._rebuild()
        return handle

    def detach(self, function: Handle | Handler) -> None:
        """Detach a handle, or all attachments of a function. Raises ValueError if it is not attached."""
        handles = [h for h in self._handles if h is function or same(h.function, function)]
        if not handles:
            raise ValueError(f"{self.name}: {name_of(function)} is not attached")
        for handle in handles:
            handle.detach()

    def wire(self, function: F, *, last: bool = False) -> F:
        """Attach a function that the loop depends on, before all handlers or, with `last`, after them.

        It is not listed in `handlers` and cannot be muted, filtered or detached. Functions attached with `last` run
        even if a handler raised.
        """
        check_function(self.name, "handler", function)
        if last:
            self._last = (*self._last, function)
        else:
            self._first = (*self._first, function)
        self._rebuild()
        return function

    def observe(self, function: F) -> F:
        """Call `function(loop, state=state)` after the handlers. It must not change anything.

        An observer that raises is logged once and disconnected.
        """
        if not callable(function):
            raise TypeError(f"{self.name}: an observer must be callable with (loop, state=state)")
        if self._signal is None:
            self._signal = _Signal(self.name)
        signal = self._signal

        def guarded(owner: object, state: State) -> None:
            try:
                function(owner, state=state)
            except Exception:  # an observer must not end the run
                logger.exception("observer %s of %s failed and is disconnected", name_of(function), self.name)
                signal.disconnect(guarded)
                self._rebuild()

        signal.connect(guarded, weak=False)
        self._rebuild()
        return function

    @property
    def handlers(self) -> tuple[Handler, ...]:
        """Attached handlers in the order of their calls, without the wiring."""
        return tuple(handle.function for handle in self._handles)

    @property
    def wiring(self) -> tuple[Handler, ...]:
        """Functions attached with `wire`."""
        return (*self._first, *self._last)

    def fire(self, state: State) -> None:
        """Count this firing and call everything attached. Exceptions get a note with the handler and the iteration."""
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
        """Raise TypeError for a handler that returned a value."""
        raise TypeError(
            f"handler {name_of(function)} on {self.name} must return None; "
            "assign to the state, or call state.halt_epoch() or state.halt_loop()"
        )

    def annotate(self, error: BaseException, call: object, state: State) -> None:
        """Note in an exception which handler raised it, and when."""
        if call != self._dispatch:  # `_call` has added a note
            where = f"epoch {state.epoch}, iteration {state.iteration}"
            error.add_note(f"in handler {name_of(call)} on {self.name}, {where}")
            if isinstance(error, AttributeError) and str(error).startswith("'State' object has no attribute"):
                error.add_note("store custom values in state.memory, which is saved with the run")

    def _dispatch(self, state: State) -> None:
        """Call everything; used if a handler is filtered or if something runs after the handlers."""
        self._call(self._gated, state)

    def finish(self, key: str, state: State, *, wired: bool) -> None:
        """Finish a postponed firing: call the handler with this key and those after it.

        The firing is not counted again. With `wired`, the wiring is called again as well.
        """
        keys = [handle.key for handle in self._handles]
        if key not in keys:
            logger.warning("%s was interrupted and is no longer attached; skipping it", key)
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
        finally:  # observers such as displays must receive an end event even if a handler raised
            for wired in last:
                wired(state)
            if observed and self._signal is not None:
                self._signal.send(self._owner, state=state)

    def _free_key(self, name: str) -> str:
        """Return a unique key: event, function name, and a number for repeated attachments of that name."""
        taken = {handle.key for handle in self._handles}
        return next(key for n in range(len(taken) + 1) if (key := f"{self.name}/{name}/{n}") not in taken)

    def remove(self, handle: Handle) -> None:
        """Remove an attachment. Does nothing if it is already detached."""
        if handle in self._handles:
            self._handles = tuple(h for h in self._handles if h is not handle)
            self._state.counts.pop(handle.key, None)
            self._rebuild()

    def recount(self) -> None:
        """Continue filters from a loaded state. Filters without saved memory start at the current clock values."""
        for handle in self._handles:
            handle.gate = self._gate(handle.filter, handle.key)
        self._rebuild()

    def _gate(self, filter: Filter | None, key: str) -> Gate | None:
        if filter is None or filter.never or filter.modulus:
            return None
        return make_gate(filter, key, self._state)

    def mute(self, by: int) -> None:
        """Add `by` to the mute level. Above 0, no handler or observer is called, but firings are counted."""
        self._muted += by
        if self._muted == 0:  # crossings during muting are dropped
            for handle in self._handles:
                self._state.counts.pop(handle.key, None)
            self.recount()
        self._rebuild()

    def _entries(self, handles: Iterable[Handle]) -> tuple[tuple[Handler, int, Gate | None], ...]:
        active = [h for h in handles if h.filter is None or not h.filter.never]
        return tuple((h.function, h.filter.modulus if h.filter else 0, h.gate) for h in active)

    def _rebuild(self) -> None:
        active = () if self._muted else self._entries(self._handles)
        self._gated = (*((function, 0, None) for function in self._first), *active)
        receivers = self._signal is not None and bool(self._signal.receivers)
        self._observed = receivers and not self._muted
        if self._last or self._observed or any(modulus or gate for _, modulus, gate in active):
            self.calls = (self._dispatch,)
        else:
            self.calls = tuple(function for function, _, _ in self._gated)
        self.listened_to = receivers or bool(self._handles or self._first or self._last)

    def __repr__(self) -> str:
        return f"Event({self.name!r}, handlers=[{', '.join(name_of(f) for f in self.handlers)}])"
