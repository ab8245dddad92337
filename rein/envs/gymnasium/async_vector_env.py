"""Worker processes of a vector environment: start, failure detection and termination.

`gymnasium.vector.AsyncVectorEnv` has one process for each environment, in `processes`, and communicates through
`parent_pipes`. If a process dies, Gymnasium raises EOFError or ConnectionError without a message, or waits forever if a
child of the process holds the pipe open. If an environment raises, its pipe becomes None. Vector environments of other
classes need no such handling.
"""

from __future__ import annotations

import contextlib
import logging
import math
import multiprocessing
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import connection
from multiprocessing.reduction import ForkingPickler
from typing import Any

from gymnasium.vector import AsyncVectorEnv
from gymnasium.vector.async_vector_env import AsyncState

from rein.envs.host.processes import GARBAGE_ADVICE, GarbageError, Pipe, check_timeout, ending, has_ended, wait
from rein.errors import WorkerDied, WorkerError, WorkerTimeout, text_of

logger = logging.getLogger(__name__)

GRACE = 10.0  # seconds that `close` waits if no timeout was given
_MOMENT = 1.0  # seconds: for actions that should be immediate, and between two checks of a silent worker
_BROKEN_PIPE = (EOFError, ConnectionError)


class _LostError(Exception):
    """Raised if the error of a worker cannot be unpickled."""


class _Pipe(Pipe):
    """Pipe with the methods that Gymnasium uses. Each may take `limit` seconds; None means no limit."""

    def __init__(self, end: Any, limit: float | None) -> None:
        super().__init__(end)
        self._limit = math.inf if limit is None else limit
        self.is_broken = False  # whether the worker has sent something that cannot be unpickled

    def send(self, value: Any) -> None:
        """Send a pickled value. Raises multiprocessing.TimeoutError if the worker does not read it.

        Something that the worker has sent without a request, such as its error, is read next, so the rest is not sent.
        """
        self.put(bytes(ForkingPickler.dumps(value)))  # pyright: ignore[reportAttributeAccessIssue]  # a function
        deadline = time.monotonic() + self._limit
        while self.unsent and not self.has_result:
            if (left := deadline - time.monotonic()) <= 0.0:
                raise multiprocessing.TimeoutError
            wait([self], min(left, _MOMENT))

    def poll(self, timeout: float = 0.0) -> bool:
        """Return whether there is a value, garbage or the end of the pipe, after `timeout` seconds at most."""
        self.read()
        deadline = time.monotonic() + timeout
        while not self.has_result and (left := deadline - time.monotonic()) > 0.0:
            wait([self], min(left, _MOMENT))
        return self.has_result

    def recv(self) -> Any:
        """Return the next value. Raises EOFError at the end, and GarbageError for data that cannot be unpickled."""
        if not self.poll(self._limit):
            raise multiprocessing.TimeoutError
        self.is_broken = True
        data: Any = self.take()
        try:
            value = ForkingPickler.loads(data)  # pyright: ignore[reportAttributeAccessIssue]  # a function
        except Exception as error:  # unpickling runs code of custom classes
            raise GarbageError(f"sent an answer that cannot be read: {text_of(error)}") from error
        self.is_broken = False
        return value


class Workers:
    """The processes behind `environment`, if it has any; `name` is used in error messages.

    `timeout` is the number of seconds that each call may take; None means no limit. Raises ValueError if the timeout is
    not above 0, if it exceeds 2e6, or if there are no processes.
    """

    def __init__(self, environment: Any, name: str, timeout: float | None) -> None:
        self._environment, self.name, self._timeout = environment, name, timeout
        self._asynchronous = isinstance(environment.unwrapped, AsyncVectorEnv)
        self.failure: str | None = None
        check_timeout(timeout)
        if self._asynchronous:
            bare = environment.unwrapped
            bare.parent_pipes[:] = [_Pipe(pipe, timeout) for pipe in bare.parent_pipes]
            bare.error_queue = _Errors(bare.error_queue, GRACE if timeout is None else max(timeout, _MOMENT))
            for method in ("step_wait", "reset_wait", "call_wait"):  # used by `step`, `reset` and `call`
                setattr(bare, method, _watched(bare, method, timeout))
        elif timeout is not None:
            raise ValueError(f"timeout={timeout}: {name} has no processes; use timeout= with an AsyncVectorEnv only")

    def explain(self, error: BaseException, seed_of: Callable[[int], int]) -> None:
        """Explain `error`, which a call of the environment raised; `seed_of(i)` is the seed of an episode, or -1.

        An error that an environment raised gets a note. Raises WorkerDied if a process is dead or if its error cannot
        be unpickled, WorkerTimeout if a process has not answered or does not read, and WorkerError if it has sent
        something that is not an answer. In each case all processes are ended. They are
        also ended after KeyboardInterrupt, SystemExit and any other error that interrupts a call. Otherwise pending
        answers would be mistaken for answers to the next call.
        """
        if not self._asynchronous:
            return
        bare = self._environment.unwrapped
        raised = [index for index, pipe in enumerate(bare.parent_pipes) if pipe is None]
        failure: Exception | None = None
        if isinstance(error, _LostError):
            failure = WorkerDied(
                f"{self._described(self._dead(), seed_of)} raised an error that cannot be unpickled:"
                f" {error.__cause__!r}; its stderr may contain more"
            )
        elif raised:
            error.add_note(f"in {self._described(raised, seed_of)}")
        elif isinstance(error, multiprocessing.TimeoutError) and self._timeout is not None:
            pipes = [*enumerate(bare.parent_pipes)]
            silent = [index for index, pipe in pipes if pipe.unsent] or [n for n, pipe in pipes if not pipe.poll()]
            failure = WorkerTimeout(f"{self._described(silent, seed_of)}: no answer within {self._timeout:g} s")
        elif isinstance(error, GarbageError):
            broken = [index for index, pipe in enumerate(bare.parent_pipes) if pipe.is_broken]
            failure = WorkerError(f"{self._described(broken, seed_of)} {error}; {GARBAGE_ADVICE}")
        elif isinstance(error, _BROKEN_PIPE):
            failure = WorkerDied(f"{self._described(self._dead(), seed_of)} ended unexpectedly")
        elif isinstance(error, Exception) and bare._state is AsyncState.DEFAULT:  # no answers are pending
            return
        self.failure = text_of(error if failure is None else failure)
        _end(bare)
        if failure is not None:
            raise failure from error

    def render(self, index: int) -> Any:
        """Return the frame of one environment. Other processes do not render."""
        bare = self._environment.unwrapped
        bare.parent_pipes[index].send(("_call", ("render", (), {})))
        _await_answers(bare, self._timeout, [index])
        frame, rendered = bare.parent_pipes[index].recv()
        bare._raise_if_errors([rendered or other != index for other in range(bare.num_envs)])
        return frame

    def close(self) -> None:
        """Close the environment. Processes that do not end within `timeout` (or 10) seconds are killed and logged."""
        if self._asynchronous:
            self._close_processes()
        self._environment.close()

    def _close_processes(self) -> None:
        bare = self._environment.unwrapped
        for pipe in bare.parent_pipes:
            pipe.put(bytes(ForkingPickler.dumps(("close", None))))  # pyright: ignore[reportAttributeAccessIssue]
        _await_exits(bare.processes, GRACE if self._timeout is None else self._timeout)
        codes = [process.exitcode for process in bare.processes]
        if not all(has_ended(process) for process in bare.processes):
            logger.warning("%s: its workers did not close in time, and were killed", self.name)
        if any(codes):
            logger.warning("%s: a worker died before or while it was closed: exit codes %s", self.name, codes)
        _end(bare)

    def _dead(self) -> list[int]:
        """Indices of the processes that have ended. A process closes its pipes just before it has an exit code."""
        processes = self._environment.unwrapped.processes
        if not any(has_ended(process) for process in processes):
            for sentinel in connection.wait([process.sentinel for process in processes], _MOMENT):
                next(process for process in processes if process.sentinel == sentinel).join(_MOMENT)
        return [index for index, process in enumerate(processes) if has_ended(process)]

    def _described(self, indices: list[int], seed_of: Callable[[int], int]) -> str:
        """Describe workers, for instance as `Taxi-v4, worker 1 of 4 (pid 71, exit code 3, episode seed 8)`."""
        processes = self._environment.unwrapped.processes
        workers = []
        for index in indices:
            facts = [f"pid {processes[index].pid}", ending(processes[index].exitcode)]
            facts.append(f"episode seed {seed_of(index)}" if seed_of(index) >= 0 else "")
            workers.append(f"worker {index} of {len(processes)} ({', '.join(filter(None, facts))})")
        return f"{self.name}, {' and '.join(workers) or 'a worker'}"


@contextlib.contextmanager
def starting() -> Iterator[None]:
    """Context for making an AsyncVectorEnv. On failure, its processes are ended and its pipes are closed.

    Raises WorkerDied if a process ends before it has answered.
    """
    try:
        yield
    except BaseException as error:
        for frame, _ in traceback.walk_tb(error.__traceback__):  # the only references to the partly built object
            if isinstance(bare := frame.f_locals.get("self"), AsyncVectorEnv):
                _end(bare)
                if (pipe := frame.f_locals.get("child_pipe")) is not None:
                    pipe.close()
        if not isinstance(error, _BROKEN_PIPE):
            raise
        raise WorkerDied(
            "a worker ended while it made its environment: if it raised an error, the error is on stderr; a killed"
            " worker leaves no message"
        ) from error


@contextlib.contextmanager
def closed_on_error(environment: Any) -> Iterator[None]:
    """Context that closes a vector environment and its processes after an exception."""
    try:
        yield
    except BaseException:
        if isinstance(environment.unwrapped, AsyncVectorEnv):
            _end(environment.unwrapped)
        environment.close()
        raise


class _Errors:
    """Queue of the errors of workers, with a time limit: an error that does not pickle never arrives."""

    def __init__(self, queue: Any, limit: float) -> None:
        self.queue, self._pipe = queue, _Pipe(queue._reader, limit)

    def get(self) -> Any:
        """Return the next error. Raises _LostError if it does not arrive in time or cannot be unpickled."""
        try:
            return self._pipe.recv()
        except Exception as error:  # unpickling runs code of the error's class
            raise _LostError from error


def _end(bare: AsyncVectorEnv[Any, Any]) -> None:
    """End all processes and close all pipes, also of an object that is partly built or already closed."""
    if hasattr(bare, "error_queue"):  # the last attribute that is set before the processes start
        processes = [process for process in bare.processes if process.pid is not None]  # the last may not have started
        for process in processes:
            process.terminate()
        _await_exits(processes, _MOMENT)
        for process in processes:
            process.kill()
            process.join()
            with contextlib.suppress(ValueError):  # it has no exit code if SIGCHLD is ignored
                process.close()
        for pipe in bare.parent_pipes:
            if pipe is not None:
                pipe.close()
        errors: Any = bare.error_queue.queue if isinstance(bare.error_queue, _Errors) else bare.error_queue
        for end in (
            errors,
            errors._reader,
            errors._writer,
        ):  # `Queue.close` alone leaves its pipe to the garbage collector
            end.close()
    bare.processes, bare.parent_pipes = [], []
    bare.closed = True  # otherwise Gymnasium would use the pipes again, at the latest when the object is deleted


def _await_exits(processes: Sequence[Any], seconds: float) -> None:
    """Wait until the processes have ended, for at most `seconds`."""
    deadline = time.monotonic() + seconds
    while running := [process for process in processes if not has_ended(process)]:
        left = deadline - time.monotonic()
        if left <= 0.0:
            return
        connection.wait([process.sentinel for process in running], min(left, _MOMENT))  # a child may hold a sentinel


def _await_answers(bare: Any, seconds: float | None, indices: Sequence[int] | None = None) -> None:
    """Wait until all workers, or those of `indices`, have answered.

    Raises multiprocessing.TimeoutError after `seconds` and EOFError if any worker is dead and has not answered. The
    pipe of a dead worker stays open if a child of the worker holds it, so the exit codes are checked every second.
    """
    deadline = math.inf if seconds is None else time.monotonic() + seconds
    for index in range(len(bare.parent_pipes)) if indices is None else indices:
        left = min(_MOMENT, deadline - time.monotonic())
        while not bare.parent_pipes[index].poll(max(left, 0.0)):
            for pipe, process in zip(bare.parent_pipes, bare.processes, strict=True):
                if has_ended(process) and not pipe.poll():
                    raise EOFError(f"process {process.pid} has ended")
            left = min(_MOMENT, deadline - time.monotonic())
            if left <= 0.0:
                raise multiprocessing.TimeoutError(f"no answer within {seconds} s")


def _watched(environment: Any, method: str, timeout: float | None) -> Callable[..., Any]:
    """Wrap a method that receives answers, with a default timeout. Keeps only a weak reference to the environment."""
    receive, proxy = getattr(type(environment), method), weakref.proxy(environment)

    def wait(limit: float | None = None) -> Any:
        _await_answers(proxy, timeout if limit is None else limit)
        return receive(proxy)

    return wait
