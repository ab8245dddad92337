"""Background thread for slow work, so that training does not wait for the disk."""

from __future__ import annotations

import collections
import os
import threading
from collections.abc import Callable

from rein.errors import StoreError

Job = Callable[[], None]


class WriterThread:
    """Background thread that runs jobs in order.

    `submit` blocks while more than `max_bytes` of work are unfinished, so memory is bounded and no job is dropped. One
    job is always accepted. The first error stops the writer permanently: queued jobs are not run, and the next method
    call raises the error. `idle` is called on the writer's thread about every `interval` seconds without work.
    """

    def __init__(self, max_bytes: int, idle: Job = lambda: None, interval: float = 3600.0) -> None:
        self._max_bytes = max_bytes
        self._idle = idle
        self._interval = interval
        self._changed = threading.Condition()  # reentrant, because the garbage collector may release a store anywhere
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
        """Whether jobs are accepted: no job failed, and the thread belongs to this process."""
        return self._error is None and os.getpid() == self._pid

    def submit(self, job: Job, size: int, wait: bool = True) -> None:
        """Queue `job()`. Blocks until there is room for its `size` in bytes. Raises StoreError if a job has failed."""
        self.check()
        with self._changed:
            if wait:
                self._changed.wait_for(lambda: self._error or self._has_room(size))
            self._raise_error()
            self._jobs.append((job, size))
            self._unfinished += size
            self._changed.notify_all()

    def wait(self) -> None:
        """Wait until all submitted jobs are done. Raises StoreError if a job failed."""
        self.check()
        with self._changed:
            self._changed.wait_for(lambda: self._error or not (self._jobs or self._busy))
            self._raise_error()

    def check(self) -> None:
        """Raise StoreError if a job failed, or if this process is a fork of the one that created the writer."""
        if os.getpid() != self._pid:
            raise StoreError(f"this store belongs to process {self._pid}; open a new store in each forked process")
        self._raise_error()

    def end(self) -> None:
        """Let the thread end when all submitted jobs are done, without waiting."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def join(self) -> None:
        """Wait until the thread has ended."""
        self._thread.join()

    def close(self) -> None:
        """Finish all jobs and end the thread. Raises StoreError if a job failed and no call has raised that yet."""
        if os.getpid() != self._pid:
            return
        self.end()
        self.join()
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
            except BaseException as caught:  # any error must reach the training thread
                error = caught
            del job  # it references the data
            with self._changed:
                self._busy = False
                self._unfinished -= size
                self._error = error
                if error is not None:
                    self._jobs.clear()
                self._changed.notify_all()
            if error is not None:
                return
