"""Background thread that calls loggers, so that training never waits for them."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

CALLS = 1_000  # maximum number of waiting calls
BYTES = 256 << 20  # maximum size of images and videos in waiting calls
PATIENCE = 60.0  # seconds without a finished call after which the end of a run no longer waits


class Call(NamedTuple):
    """Waiting call, the size of its data in bytes, and the row that it writes, if any."""

    function: Callable[[], None]
    size: int = 0
    row: Any = None


class Calls:
    """Makes calls in order, in a thread. `put` never waits. The functions must not raise."""

    def __init__(self, name: str) -> None:
        """Create a queue without calls. `name` is a part of the name of the thread."""
        self._name = name
        self._changed = threading.Condition()
        self._waiting: collections.deque[Call] = collections.deque()  # the first one may be in progress
        self._size = 0
        self._thread: threading.Thread | None = None
        self._ends = False
        self.last_row: Any = None  # last row of a finished call

    def put(self, call: Call, *, always: bool = False) -> bool:
        """Add a call. Return False if too many are waiting, unless `always`."""
        with self._changed:
            full = len(self._waiting) >= CALLS or (call.size and self._size + call.size > BYTES)
            if full and not always:
                return False
            self._waiting.append(call)
            self._size += call.size
            self._ends = False
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=f"rein-{self._name}", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        return True

    def rows(self) -> tuple[Any, list[Any]]:
        """Return the last written row, and the rows that are not written yet."""
        with self._changed:
            return self.last_row, [call.row for call in self._waiting if call.row is not None]

    def finish(self) -> bool:
        """Wait for all calls and end the thread. Return False if no call finishes for `PATIENCE` seconds."""
        with self._changed:
            self._ends = True
            self._changed.notify_all()
            while self._thread is not None:
                if not self._changed.wait(PATIENCE):
                    return False
        return True

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._ends)
                if not self._waiting:
                    self._thread = None
                    self._changed.notify_all()
                    return
                call = self._waiting[0]
            call.function()
            with self._changed:
                self._waiting.popleft()
                self._size -= call.size
                if call.row is not None:
                    self.last_row = call.row
                self._changed.notify_all()
            del call  # it references the data
