"""Work in a handler that takes long, such as an evaluation: it ends early when the run is to end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rein.loop.engine import POSTPONES
from rein.loop.events import Handle, Postponed
from rein.loop.state import INTERRUPT, Handler, State

if TYPE_CHECKING:
    from rein.loop.loop import Loop


class Unfinished(Exception):
    """Raised out of work whose run is to end."""


class Interruptible:
    """The work of one handler.

    Call `begin` before the work, `check` at each of its steps, and `leave` if `Unfinished` was raised, after undoing
    the work. An interrupt then postpones the handler to the next run; a halt of the loop discards the work. In an event
    that cannot be postponed, an interrupt waits until the work is done.
    """

    def __init__(self) -> None:
        self._handle: Handle | None = None  # None if its event cannot be postponed
        self._interruptible = False

    def attach(self, loop: Loop, event: str, handler: Handler, **filters: Any) -> None:
        """Attach the handler that does the work."""
        handle = loop.event(event).attach(handler, **filters)
        if event in POSTPONES:
            self._handle = handle
        if event in POSTPONES or event == "started":  # which fires in the next run anyway
            self._interruptible = True

    def begin(self, state: State) -> None:
        """Begin the work: a halt of the loop that was asked for before does not end it."""
        state._stopped = False

    def check(self, state: State) -> None:
        """Raise `Unfinished` if the end of the run was asked for since `begin`, or an interrupt at any time."""
        if state._stopped or state._left or (self._interruptible and INTERRUPT in state._halts):
            raise Unfinished

    def leave(self, state: State) -> None:
        """End the handler. Raises `Postponed` if the next run is to do the work."""
        if self._interruptible and INTERRUPT in state._halts:
            if self._handle is not None:
                raise Postponed(self._handle)
        else:
            state._left = True
