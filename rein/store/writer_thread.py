"""A thread that does slow work in order, so that training does not wait for the disk."""

from __future__ import annotations

import collections
import os
import threading
from collections.abc import Callable

from rein.errors import StoreError

Job = Callable[[], None]


class Writer:
    """Runs jobs one after the other on a thread of its own.

    `submit` blocks while `max_bytes` of work are unfinished (one job is always let in), so memory stays bounded and
    nothing is dropped. The first error stops the writer for good: what waits is not begun, and the error surfaces in
    the thread that calls next. `idle` is called on the writer's thread about every `interval` seconds without work.
    """

    def __init__(self, max_bytes: int, idle: Job, interval: float) -> None:
        self._max_bytes = max_bytes
        self._idle = idle
        self._interval = interval
        self._changed = threading.Condition()  # reentrant, for the garbage collector may release a store at any line
        self._jobs: collections.deque[tuple[Job, int]] = collections.deque()
        self._unfinished = 0  # bytes
        self._busy = False
        self._closed = False
        self._error: BaseException | None = None
        self._reported = False
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="rein-writer", daemon=True)
        self._thread.start()

    @property
    def works(self) -> bool:
        """Whether jobs are still taken: nothing failed, and this is the process that the thread lives in."""
        return self._error is None and os.getpid() == self._pid

    def submit(self, job: Job, size: int, wait: bool = True) -> None:
        """Have `job()` run after those before it; waits for room for its `size` in bytes. Raises an earlier error."""
        self.check()
        with self._changed:
            if wait:
                self._changed.wait_for(lambda: self._error or self._has_room(size))
            self._raise_error()
            self._jobs.append((job, size))
            self._unfinished += size
            self._changed.notify_all()

    def wait(self) -> None:
        """Return when everything submitted is done. Raises StoreError if something failed."""
        self.check()
        with self._changed:
            self._changed.wait_for(lambda: self._error or not (self._jobs or self._busy))
            self._raise_error()

    def check(self) -> None:
        """Raise StoreError if a job failed, or if this is a fork of the process whose thread does the work."""
        if os.getpid() != self._pid:
            raise StoreError(f"this store belongs to process {self._pid}; a fork of it must open a store of its own")
        self._raise_error()

    def end(self) -> None:
        """Have the thread end when everything submitted is done; does not wait for that."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def close(self) -> None:
        """Finish everything and end the thread. Raises StoreError if something failed that nobody was told yet."""
        if os.getpid() != self._pid:
            return
        self.end()
        self._thread.join()
        if not self._reported:
            self._raise_error()

    def _has_room(self, size: int) -> bool:
        return self._unfinished == 0 or self._unfinished + size <= self._max_bytes

    def _raise_error(self) -> None:
        if self._error is not None:
            self._reported = True
            raise StoreError(str(self._error)) from self._error

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._closed, self._interval)
                if self._closed and not self._jobs:
                    return
                job, size = self._jobs.popleft() if self._jobs else (self._idle, 0)
                self._busy = True
            error = None
            try:
                job()
            except BaseException as caught:  # whatever it is, it must reach the training thread
                error = caught
            del job  # it holds the data
            with self._changed:
                self._busy = False
                self._unfinished -= size
                self._error = error
                if error is not None:
                    self._jobs.clear()
                self._changed.notify_all()
            if error is not None:
                return
