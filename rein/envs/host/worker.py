"""Workers: threads and processes with a `Server`, as the main process sees them.

A worker has a queue of requests and answers them in order. The file descriptor of the shared memory is sent to a
process, so the memory is freed with the last process that uses it, however that process ends.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import mmap
import multiprocessing
import os
import queue
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

from gymnasium.vector.utils import CloudpickleWrapper

from rein.envs.host.block import About, Setup
from rein.envs.host.processes import PICKLE, GarbageError, Pipe, ending, has_ended, wait
from rein.envs.host.server import ANSWERS, Answer, Request, Server, Slots, encoded, failure, loads, serve
from rein.errors import text_of

logger = logging.getLogger(__name__)

MOMENT = 0.05  # seconds between two checks whether a silent process has ended
_BROKEN_PIPE = (EOFError, OSError)
_parent_ends: weakref.WeakSet[Pipe] = weakref.WeakSet()  # a forked process must not keep them open


def shared_memory(size: int) -> int:
    """Return the file descriptor of `size` bytes of memory without a name."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("rein-workers")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, size)
    return descriptor


class Worker:
    """A process or thread with some of the simulators, and its unanswered requests."""

    slots: Slots
    rows: range
    agents: int
    pid: int | None = None
    is_attached = False  # whether it has slots
    garbage: str | None = None  # what a process has sent instead of an answer

    def __init__(self, number: int, numbers: range, setup: Setup) -> None:
        self.number, self.numbers, self.setup = number, numbers, setup
        self.pending: deque[Request] = deque()
        self.since = 0.0  # when the worker began with the first of them
        self.lost: dict[int, Any] = {}  # simulators whose lost episode was not reported yet: options of the next
        self.changed: dict[int, Any] = {}  # options of the next episodes that the worker does not know yet

    @property
    def place(self) -> tuple[int, int]:
        """Simulator that the worker steps or resets, and its episode seed; -1 if there is none."""
        return (int(self.slots.place[0]), int(self.slots.place[1])) if self.is_attached else (-1, -1)

    def ask(self, request: Request) -> None:
        """Queue a request."""
        if not self.pending:
            self.since = time.monotonic()
        self.pending.append(request)
        self._put(request)

    def _put(self, request: Request) -> None:
        raise NotImplementedError

    def _set_rows(self, about: About) -> None:
        """Set the rows of the worker's simulators, and the number of rows of each."""
        self.agents = about.rows
        self.rows = range(self.numbers.start * about.rows, self.numbers.stop * about.rows)

    def take_changed(self) -> dict[int, Any] | None:
        """Return the options that the worker does not know yet, and forget them."""
        changed, self.changed = self.changed, {}
        return changed or None


class ThreadWorker(Worker):
    """Worker that is a daemon thread."""

    exitcode = None

    def __init__(self, number: int, numbers: range, setup: Setup, bell: queue.SimpleQueue[None]) -> None:
        super().__init__(number, numbers, setup)
        self.bell, self._requests = bell, queue.SimpleQueue[Any]()
        self._answers: deque[Answer] = deque()
        self._thread = threading.Thread(target=self._run, name=f"rein worker {number} of {setup.name}", daemon=True)

    def start(self) -> None:
        """Start the thread. Its first answer is `About`."""
        self.since = time.monotonic()
        self.pending.append(Request("about", ()))
        self._thread.start()

    def attach(self, about: About) -> None:
        """Make the slots."""
        self._set_rows(about)
        self.slots, self.is_attached = Slots(self.setup, about, len(self.numbers)), True
        self._requests.put(self.slots)

    def _put(self, request: Request) -> None:
        self._requests.put(request)

    def receive(self) -> Answer:
        """Return the next answer, which must be there."""
        return self._answers.popleft()

    @property
    def has_answer(self) -> bool:
        """Whether there is an answer."""
        return bool(self._answers)

    @property
    def has_ended(self) -> bool:
        """Whether the worker ended on its own. A thread cannot."""
        return False

    def ask_to_close(self) -> None:
        """Let the worker close its environments and end, after all requests."""
        self._requests.put(None)

    def join(self, deadline: float) -> bool:
        """Wait until the worker has ended. Returns whether it has."""
        if self._thread.ident is not None:
            self._thread.join(max(0.0, deadline - time.monotonic()))
        return not self._thread.is_alive()

    def kill(self) -> str | None:
        """Abandon the thread. Returns what happened, for the log."""
        if self._thread.is_alive():
            return "did not end in time; threads cannot be killed, so it was abandoned"
        return None

    def _run(self) -> None:
        try:
            server = Server(self.setup, self.numbers)
            answer = Answer(server.block.about)
        except BaseException as error:  # returned
            server, answer = None, failure(error)
        self._reply(answer)
        if server is None:
            return
        while isinstance(request := self._requests.get(), Slots | Request):
            if isinstance(request, Slots):
                server.attach(request)
            else:
                self._reply(server.answer(request))
        try:
            server.close()
        except Exception:  # nothing waits for an answer
            logger.exception("an environment raised an error in its close")

    def _reply(self, answer: Answer) -> None:
        self._answers.append(answer)
        self.bell.put(None)


def wait_for_threads(workers: Sequence[ThreadWorker], seconds: float) -> list[ThreadWorker]:
    """Return the workers that have answered, after `seconds` at most."""
    if not any(worker._answers for worker in workers):
        with contextlib.suppress(queue.Empty):
            workers[0].bell.get(timeout=max(seconds, 0.0))
    return [worker for worker in workers if worker._answers]


class ProcessWorker(Worker):
    """Worker that is a daemon process. It ends together with its parent."""

    def __init__(self, number: int, numbers: range, setup: Setup) -> None:
        super().__init__(number, numbers, setup)
        context = multiprocessing.get_context()
        own_end, self._theirs = context.Pipe()
        self.pipe = Pipe(own_end, PICKLE + b"".join(ANSWERS))
        _parent_ends.add(self.pipe)
        forked = context.get_start_method() == "fork"
        inherited = [*_parent_ends] if forked else []
        ends_with_parent = threading.current_thread() is threading.main_thread()
        make_server: Any = functools.partial(Server, setup, numbers)
        args = (self._theirs, inherited, CloudpickleWrapper(make_server), os.getpid())
        self._process = context.Process(  # type: ignore[attr-defined]  # every context has it
            target=serve, args=(*args, ends_with_parent), name=f"rein worker {number} of {setup.name}", daemon=True
        )

    def start(self) -> None:
        """Start the process. Its first answer is `About`."""
        self.since = time.monotonic()
        self.pending.append(Request("about", ()))
        try:
            self._process.start()
        finally:
            self._theirs.close()
        self.pid = self._process.pid

    def attach(self, about: About) -> None:
        """Make the slots, and send their memory to the process."""
        self._set_rows(about)
        setup, count = self.setup, len(self.numbers)
        descriptor = shared_memory(Slots(setup, about, count).nbytes)
        try:
            self.slots, self.is_attached = Slots(setup, about, count, mmap.mmap(descriptor, 0)), True
            with contextlib.suppress(*_BROKEN_PIPE):  # found out by `receive`
                self.pipe.put_descriptor(descriptor)
        finally:
            os.close(descriptor)

    def _put(self, request: Request) -> None:
        self.pipe.put(encoded(request))

    def receive(self) -> Answer | None:
        """Return the next answer. Returns None if the process has ended, and for `garbage`."""
        try:
            data: Any = self.pipe.take()
        except EOFError:
            self.join(time.monotonic() + 1.0)
            return None
        except GarbageError as error:
            self.garbage = str(error)
            return None
        try:
            answer = ANSWERS.get(data) or loads(data)
        except Exception as error:  # unpickling runs code of custom classes
            self.garbage = f"sent an answer that cannot be read: {text_of(error)}"
            return None
        if not isinstance(answer, Answer):
            self.garbage = f"sent data that is not an answer: {data[:40]!r}"
            return None
        return answer

    @property
    def has_answer(self) -> bool:
        """Whether there is an answer, garbage, or the end of the pipe."""
        self.pipe.read()
        return self.pipe.has_result

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended."""
        return has_ended(self._process)

    @property
    def exitcode(self) -> int | None:
        """Exit code of the process; negative for a signal, None while it runs and if SIGCHLD is ignored."""
        return self._process.exitcode

    def ask_to_close(self) -> None:
        """Let the worker close its environments and end, after the current request."""
        if self.pid is not None:
            self.pipe.end()

    def join(self, deadline: float) -> bool:
        """Wait until the process has ended. Returns whether it has."""
        if self.pid is None:
            return True
        while not self.has_ended and (left := deadline - time.monotonic()) > 0.0:
            self._process.join(min(left, MOMENT))  # a child of the process may hold its sentinel
        return self.has_ended

    def kill(self) -> str | None:
        """Kill the process if it runs, and close all descriptors. Returns what happened, for the log."""
        happened = None
        if self.pid is not None:
            if not self.has_ended:
                happened = "did not end in time, and was killed"
                self._process.kill()
                self.join(time.monotonic() + 1.0)
            elif self._process.exitcode:
                happened = f"died before or while it was closed ({ending(self._process.exitcode)})"
            with contextlib.suppress(ValueError):  # a process that waits for a device goes on; others left no exit code
                self._process.close()
            self.pid = None
        self.pipe.close()
        self._theirs.close()
        return happened


def wait_for_processes(workers: Sequence[ProcessWorker], seconds: float) -> list[ProcessWorker]:
    """Return the workers that have answered or ended, after `seconds` at most."""
    ready = {*wait([worker.pipe for worker in workers], seconds)}
    return [worker for worker in workers if worker.pipe in ready]
