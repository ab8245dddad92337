"""The processes of a vector environment: who of them died or does not answer, and their end within a bounded time.

`gymnasium.vector.AsyncVectorEnv` has one process for each environment, in `processes`, and speaks with it through
`parent_pipes`. A process that ends by itself shows as an EOFError or a ConnectionError without a word; one whose
environment raised has handed the error over, and its pipe is None. Other vector environments are left alone.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import multiprocessing
import os
import signal
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import connection
from multiprocessing.reduction import ForkingPickler
from typing import Any

import gymnasium
from gymnasium.vector import AsyncVectorEnv, AutoresetMode

from rein.errors import WorkerDied, WorkerTimeout
from rein.integrations.gymnasium.making import Source, make
from rein.rollout.contract import checked_num_envs

logger = logging.getLogger(__name__)

GRACE = 10.0  # seconds that `close` waits where no timeout was given
_MOMENT = 1.0  # seconds for what should be there at once: the exit code of a dead process, the end of a terminated one
_LONGEST = 2e6  # seconds: poll(2) takes 2**31 milliseconds
_BROKEN_PIPE = (EOFError, ConnectionError)


class _LostError(Exception):
    """A worker has said that it raised, and what it raised cannot be had."""


class Workers:
    """The processes behind `environment`, if it has any; `name` is what errors call it.

    `timeout` is how many seconds each call may take, None for no limit. Raises ValueError for a timeout that is not
    above 0 or longer than 2e6, and for one where there are no processes to wait for.
    """

    def __init__(self, environment: Any, name: str, timeout: float | None) -> None:
        self._environment, self.name, self._timeout = environment, name, timeout
        self._asynchronous = isinstance(environment.unwrapped, AsyncVectorEnv)
        self._failure: str | None = None
        if timeout is not None and not 0 < timeout <= _LONGEST:
            raise ValueError(f"timeout={timeout}: give seconds above 0 and at most {_LONGEST:g}, or None for no limit")
        if self._asynchronous:
            queue = environment.unwrapped.error_queue
            queue.get = _readable(queue.get, GRACE if timeout is None else max(timeout, _MOMENT))
        if timeout is None:
            return
        if not self._asynchronous:
            raise ValueError(f"timeout={timeout}: {name} has no processes to wait for; it takes an AsyncVectorEnv")
        for method in ("step_wait", "reset_wait", "call_wait"):  # which `step`, `reset` and `call` wait by
            setattr(environment.unwrapped, method, _limited(environment.unwrapped, method, timeout))

    def check(self) -> None:
        """Raise RuntimeError where the processes were ended after a failure."""
        if self._failure is not None:
            raise RuntimeError(f"{self.name}: its workers were ended after a failure; build it anew ({self._failure})")

    def explain(self, error: BaseException, seed_of: Callable[[int], int]) -> None:
        """Say what `error`, which a call of the environment raised, is about; `seed_of(i)` is an episode's, or -1.

        What an environment raised gets a note. A process that is dead is a WorkerDied, one that has not answered a
        WorkerTimeout; one whose error is lost on its way a WorkerDied, too. In each case, and where KeyboardInterrupt
        or SystemExit has broken the call off, all processes are ended, for the answers of the others would be taken for
        those to the next call. Anything else passes.
        """
        if not self._asynchronous:
            return
        bare = self._environment.unwrapped
        raised = [index for index, pipe in enumerate(bare.parent_pipes) if pipe is None]
        failure: Exception | None = None
        if isinstance(error, _LostError):
            failure = WorkerDied(
                f"{self._told(self._dead(), seed_of)} raised what cannot be unpickled here: {error.__cause__!r}; its"
                " stderr may say more"
            )
        elif raised:
            error.add_note(f"in {self._told(raised, seed_of)}")
        elif isinstance(error, multiprocessing.TimeoutError) and self._timeout is not None:
            silent = [index for index, pipe in enumerate(bare.parent_pipes) if not pipe.poll()]
            failure = WorkerTimeout(f"{self._told(silent, seed_of)}: no answer within {self._timeout:g} s")
        elif isinstance(error, _BROKEN_PIPE):
            dead = self._dead()
            failure = WorkerDied(f"{self._told(dead, seed_of)} ended by itself")
        elif isinstance(error, Exception):
            return
        self._failure = repr(error) if failure is None else str(failure)
        _end(bare)
        if failure is not None:
            raise failure from error

    def close(self) -> None:
        """Close the environment; what has not ended in `timeout` (or 10) seconds is killed, and logged, not raised."""
        if not self._asynchronous:
            self._environment.close()
            return
        limit = threading.Timer(GRACE if self._timeout is None else self._timeout, self._give_up)
        limit.daemon = True
        limit.start()
        try:
            self._environment.close()
        except (*_BROKEN_PIPE, multiprocessing.TimeoutError) as error:
            logger.warning("%s: a worker was dead, or did not answer, when it was closed: %r", self.name, error)
        finally:
            limit.cancel()
            _end(self._environment.unwrapped)

    def _dead(self) -> list[int]:
        """Who has ended. The pipes of a process are closed a moment before its exit code is there."""
        processes = self._environment.unwrapped.processes
        ended = connection.wait([process.sentinel for process in processes], _MOMENT)
        dead = [index for index, process in enumerate(processes) if process.sentinel in ended]
        for index in dead:
            processes[index].join(_MOMENT)
        return dead

    def _give_up(self) -> None:
        """From another thread: `close` finds that the pipes are broken then, and comes back."""
        logger.warning("%s: its workers did not close in time, and were killed", self.name)
        _kill(self._environment.unwrapped)

    def _told(self, indices: list[int], seed_of: Callable[[int], int]) -> str:
        """For instance `Taxi-v4, worker 1 of 4 (pid 71, exit code 3, episode seed 8)`."""
        processes = self._environment.unwrapped.processes
        told = []
        for index in indices:
            facts = [f"pid {processes[index].pid}", _ending(processes[index].exitcode)]
            facts.append(f"episode seed {seed_of(index)}" if seed_of(index) >= 0 else "")
            told.append(f"worker {index} of {len(processes)} ({', '.join(filter(None, facts))})")
        return f"{self.name}, {' and '.join(told) or 'a worker'}"


def in_processes(source: Source, num_envs: int, make_kwargs: Mapping[str, Any]) -> AsyncVectorEnv[Any, Any]:
    """N processes with one environment each, which are reset when they are told to.

    Raises ValueError for an id that Gymnasium does not know, TypeError for a number that is no integer, and WorkerDied
    where a process ends before it is asked.
    """
    num_envs = checked_num_envs(num_envs)
    single = functools.partial(_make_in_worker, os.getpid(), source, make_kwargs)
    with starting():
        return AsyncVectorEnv([single] * num_envs, autoreset_mode=AutoresetMode.DISABLED)


@contextlib.contextmanager
def starting() -> Iterator[None]:
    """Around the making of an AsyncVectorEnv: WorkerDied where a process ends before it has answered at all."""
    try:
        yield
    except _BROKEN_PIPE as error:
        for frame, _ in traceback.walk_tb(error.__traceback__):  # nobody else has the half-made object
            if isinstance(bare := frame.f_locals.get("self"), AsyncVectorEnv):
                _end(bare)
        raise WorkerDied(
            "a worker ended while it made its environment: what it raised, if it did, stands on stderr, and one that"
            " was killed leaves no word"
        ) from error


def _make_in_worker(main: int, source: Source, make_kwargs: Mapping[str, Any]) -> Any:
    """What `source` gives; Ctrl-C, which a terminal sends to all processes, is left to the process `main`."""
    if os.getpid() != main:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    made = make(source, make_kwargs)
    return _Portable(made) if isinstance(made, gymnasium.Env) else made


class _Portable(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Raises only what reaches the main process: Gymnasium pickles it in a thread, which loses what does not pickle."""

    def reset(self, **kwargs: Any) -> Any:
        with _portable():
            return self.env.reset(**kwargs)

    def step(self, action: Any) -> Any:
        with _portable():
            return self.env.step(action)

    def render(self) -> Any:
        with _portable():
            return self.env.render()


@contextlib.contextmanager
def _portable() -> Iterator[None]:
    """RuntimeError with the traceback's text for an error that does not pickle, or is not made of one argument."""
    try:
        yield
    except Exception as error:  # of an environment, raised again
        try:
            got = ForkingPickler.loads(ForkingPickler.dumps(error))  # pyright: ignore[reportAttributeAccessIssue]  # a function
            type(error)(got)  # as the queue, then Gymnasium do
        except Exception:  # whatever its class makes of that
            raise RuntimeError("".join(traceback.format_exception(error))) from None
        raise


def _readable(get: Callable[..., Any], limit: float) -> Callable[[], Any]:
    """What a queue's `get` gives within `limit` seconds; _LostError for nothing, and for what cannot be unpickled."""

    def limited() -> Any:
        try:
            return get(timeout=limit)
        except Exception as error:  # of a class of somebody else's
            raise _LostError from error

    return limited


def _end(bare: AsyncVectorEnv[Any, Any]) -> None:
    """End all processes, and leave nothing of them: no process, no zombie, no pipe."""
    for process in bare.processes:
        process.terminate()
    deadline = time.monotonic() + _MOMENT
    for process in bare.processes:
        process.join(max(deadline - time.monotonic(), 0.0))
    _kill(bare)
    for process in bare.processes:
        process.join()
    for pipe in bare.parent_pipes:
        if pipe is not None:
            pipe.close()
    bare.closed = True  # else Gymnasium talks to them once more, at the latest when the object goes


def _kill(bare: AsyncVectorEnv[Any, Any]) -> None:
    for process in bare.processes:
        process.kill()


def _limited(environment: Any, method: str, timeout: float) -> Callable[..., Any]:
    """The method with `timeout` where it is given none; it holds no reference that would keep its object alive."""
    unlimited, itself = getattr(type(environment), method), weakref.proxy(environment)

    def wait(limit: float | None = None) -> Any:
        return unlimited(itself, timeout if limit is None else limit)

    return wait


def _ending(exitcode: int | None) -> str:
    if exitcode is None:
        return ""
    if exitcode >= 0:
        return f"exit code {exitcode}"
    try:
        return f"killed by {signal.Signals(-exitcode).name}"
    except ValueError:  # most of the real-time signals have no name
        return f"killed by signal {-exitcode}"
