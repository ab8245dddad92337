"""Workers of `GymnasiumWorkers`: a process or a thread that steps a block of environments.

A worker has a queue of requests and answers them in order. Actions, observations, rewards and flags are in `Slots`. The
slots of a process are shared memory without a name: its file descriptor is sent to the process, so the memory is freed
with the last process that uses it, however that process ends.

Shapes: N environments of a worker, R of them, A one action, O one observation.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import math
import mmap
import multiprocessing
import os
import queue
import select
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import connection
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector.utils import CloudpickleWrapper
from torch import Tensor

from rein.envs.base.pipes import PICKLE, GarbageError, Pipe, has_ended, wait
from rein.envs.gymnasium import masks
from rein.envs.gymnasium.adapter import GymnasiumEnvironment
from rein.envs.gymnasium.async_vector_env import ending
from rein.errors import text_of
from rein.ops.trees import map_tree
from rein.spaces import children
from rein.spaces.conversion import layout
from rein.types import TimeStep, Tree

logger = logging.getLogger(__name__)

MOMENT = 0.05  # seconds between two checks whether a silent process has ended
_PR_SET_PDEATHSIG = 1  # of Linux's prctl(2)
_BROKEN_PIPE = (EOFError, OSError)
_parent_ends: weakref.WeakSet[Pipe] = weakref.WeakSet()  # a forked process must not keep them open

Build = Callable[..., GymnasiumEnvironment]  # function of a number of environments


class Request(NamedTuple):
    """Request to a worker: a method of `Block`, and its arguments."""

    method: str
    args: tuple[Any, ...]
    rows: Sequence[int] = ()  # environments of a step
    steps: int = 1  # number of times that the worker steps or resets its environments


class Answer(NamedTuple):
    """Answer of a worker."""

    value: Any = None
    options: list[tuple[int, dict[str, Any] | None]] | None = None  # of the episodes that have begun
    error: BaseException | bytes | None = None  # pickled by a process
    trace: str | None = None  # traceback of an error


class About(NamedTuple):
    """Properties of the environments of a worker."""

    observation_space: spaces.Space[Any]
    action_space: spaces.Space[Any]
    render_mode: str | None
    render_fps: float | None
    infos: Mapping[str, np.ndarray[Any, Any]]  # default values of the requested infos
    identities: list[int]  # of the environments


class Slots:
    """Arrays of N environments for actions and results, in `memory` or, without it, in new memory."""

    def __init__(self, about: About, num_envs: int, memory: mmap.mmap | None = None) -> None:
        self._memory, self.nbytes = memory, 0
        lead, infos = (num_envs,), about.infos
        self.action = self._tree(about.action_space, lead)
        self.observation, self.final = (self._tree(about.observation_space, lead) for _ in range(2))
        self.info = {key: self._array((*lead, *value.shape), value.dtype) for key, value in infos.items()}
        self.reward = self._array(lead, np.dtype(np.float32))
        self.flags = self._array((3, *lead), np.dtype(np.bool_))  # terminated, truncated, valid
        self.index, self.seed = (self._array(lead, np.dtype(np.int64)) for _ in range(2))  # of the current episodes
        self.place = self._array((2,), np.dtype(np.int64))  # environment that is stepped or reset, and its episode seed
        self.place[:] = -1
        self._missing = infos

    def _tree(self, space: spaces.Space[Any], lead: tuple[int, ...]) -> Tree:
        inner = children(space)
        if inner is not None:
            return {key: self._tree(child, lead) for key, child in inner.items()}
        shape, dtype = layout(space)
        return self._array((*lead, *shape), dtype)

    def _array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
        begin = -(-self.nbytes // 64) * 64
        self.nbytes = begin + max(1, math.prod(shape) * dtype.itemsize)
        return np.zeros(shape, dtype) if self._memory is None else np.ndarray(shape, dtype, self._memory, begin)

    def put_step(self, rows: Any, time_step: TimeStep, ended: bool) -> None:
        """Set the result of a step of the environments `rows` (R,), or of all for a slice."""
        _put(self.observation, rows, time_step.observation)
        if ended:
            _put(self.final, rows, time_step.final_observation)
        self.reward[rows] = time_step.reward.numpy()
        for flag, values in enumerate((time_step.terminated, time_step.truncated, time_step.valid)):
            self.flags[flag, rows] = values.numpy()
        for key, values in time_step.info.items():
            self.info[key][rows] = values.numpy()

    def put_lost(self, rows: Sequence[int], last: Tree) -> None:
        """Set the result of environments (R,) whose episodes were lost: truncated after `last` (R, *O), not valid."""
        chosen = np.array(rows, np.int64)
        _put(self.final, chosen, last)
        self.reward[chosen] = 0.0
        self.flags[:, chosen] = np.array([[False], [True], [False]])
        for key, missing in self._missing.items():
            self.info[key][chosen] = missing


def _put(arrays: Tree, rows: Any, values: Tree) -> None:
    if isinstance(arrays, dict):
        for key, part in arrays.items():
            _put(part, rows, values[key])
    else:
        arrays[rows] = values.numpy()


def shared_memory(size: int) -> int:
    """Return the file descriptor of `size` bytes of memory without a name."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("rein-workers")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, size)
    return descriptor


class Block:
    """Environments of one worker, and the methods that requests call. `first` is the number of the first one."""

    def __init__(self, build: Build, rows: range) -> None:
        self.environment = build(len(rows), _first=rows.start)
        self.rows, self._all = rows, range(len(rows))

    def about(self) -> About:
        """Return the properties of the environments."""
        one = self.environment
        mode, infos = one._envs[0].render_mode, one._info
        identities = [id(environment.unwrapped) for environment in one._envs]
        return About(one.single_observation_space, one.single_action_space, mode, one.render_fps, infos, identities)

    def attach(self, slots: Slots) -> None:
        """Set the place of actions and results."""
        self._slots = slots
        self._action = map_tree(torch.from_numpy, slots.action)
        self.environment._place = slots.place

    def answer(self, request: Request) -> Answer:
        """Call the method of a request. Errors are returned."""
        try:
            return getattr(self, request.method)(*request.args)
        except BaseException as error:  # returned
            return failure(error)

    def step(self, rows: Sequence[int] | None, changed: Mapping[int, Any] | None) -> Answer:
        """Step the environments in `rows` (R,), or all for None. The value is whether an episode ended."""
        self._change(changed)
        time_step = self.environment._advance(self._action, self._all if rows is None else rows)
        ended = time_step.final_observation is not time_step.observation
        self._slots.put_step(slice(None) if rows is None else np.array(rows, np.int64), time_step, ended)
        return Answer(ended, self._begun(self._all if rows is None else rows) if ended else None)

    def begin(self, seeds: tuple[Any, ...], options: dict[str, Any], again: bool | None, current: Any) -> Answer:
        """Begin the next episodes, or those with the seeds `current`: `again` with the current options.

        The value is whether the infos have masks that are not used.
        """
        one = self.environment
        one._seeds.set_part(*seeds)
        one._options.load_state_dict(options)
        observation = (
            one.reset()
            if again is None
            else one._begin(one._seeds.override(torch.tensor(current, dtype=torch.int64, device="cpu")), again)
        )
        _put(self._slots.observation, slice(None), observation)
        return Answer(one._name in masks._warned, self._begun(self._all))

    def reset_where(self, rows: Sequence[int], changed: Mapping[int, Any] | None) -> Answer:
        """Begin the next episodes of the environments in `rows` (R,)."""
        self._change(changed)
        mask_N = torch.zeros(len(self._all), dtype=torch.bool, device="cpu")
        mask_N[[*rows]] = True
        _put(self._slots.observation, slice(None), self.environment.reset_where(mask_N))
        return Answer(None, self._begun(rows))

    def save(self) -> Answer:
        """The value is the state of the action history, as arrays."""
        return Answer(map_tree(_as_array, self.environment._history.state_dict()))

    def load(self, state: Any) -> Answer:
        """Load a state, and repeat its episodes."""
        self.environment.load_state_dict(map_tree(_as_tensor, state))
        _put(self._slots.observation, slice(None), self.environment._observation)
        return Answer(None, self._begun(self._all))

    def render(self, row: int) -> Answer:
        """The value is a frame."""
        return Answer(self.environment.render(row))

    def close(self) -> None:
        """Close the environments."""
        self.environment.close()

    def _change(self, changed: Mapping[int, Any] | None) -> None:
        if changed is not None:
            self.environment.set_options([*changed.values()], changed)

    def _begun(self, rows: Sequence[int]) -> list[tuple[int, dict[str, Any] | None]] | None:
        """Set the index and the seed of the current episodes of `rows` (R,). Returns their options, if any are used."""
        one, slots = self.environment, self._slots
        slots.index[:], slots.seed[:] = one._seeds._indices, one._seeds._current
        return [(row, one._options.of(row)) for row in rows] if one._options.current is not None else None


def _as_array(value: Any) -> Any:
    return value.numpy() if isinstance(value, Tensor) else value


def _as_tensor(value: Any) -> Any:
    return torch.from_numpy(value) if isinstance(value, np.ndarray) else value


def failure(error: BaseException) -> Answer:
    """Return an error as an answer."""
    return Answer(error=error, trace="".join(traceback.format_exception(error)))


def _pickled(answer: Answer) -> bytes:
    """Return a pickled answer. An error that cannot be pickled is left out, and its traceback remains."""
    try:
        data = None if answer.error is None else dumps(answer.error)
        if data is not None:
            loads(data)
        return dumps(answer._replace(error=data))
    except Exception as error:  # the class of an error or of a frame can raise anything
        return dumps(Answer(trace=answer.trace or "".join(traceback.format_exception(error))))


def dumps(value: Any) -> bytes:
    """Return a pickled value. Raises any exception if its class does not support it."""
    return bytes(ForkingPickler.dumps(value))  # pyright: ignore[reportAttributeAccessIssue]  # a function


def loads(data: bytes) -> Any:
    """Return a value that `dumps` has pickled in this or another process. Raises any exception of its classes."""
    return ForkingPickler.loads(data)  # pyright: ignore[reportAttributeAccessIssue]  # a function


# Steps are sent without pickle, which takes longer than the step of a small environment.
_STEP_ALL, _STEP, _ANSWERS = b"*", b"+", {b"0": Answer(False), b"1": Answer(True)}


def _encoded(request: Request) -> bytes:
    if request.method != "step" or request.args[1] is not None:
        return dumps(request)
    return _STEP_ALL if isinstance(request.rows, range) else _STEP + np.array(request.rows, np.int64).tobytes()


def _decoded(data: bytes) -> Any:
    if data[:1] not in (_STEP_ALL, _STEP):
        return loads(data)
    return Request("step", (None if data == _STEP_ALL else np.frombuffer(data[1:], np.int64).tolist(), None))


class Worker:
    """A process or thread with some of the environments, and its unanswered requests."""

    slots: Slots
    pid: int | None = None
    is_attached = False  # whether it has slots
    garbage: str | None = None  # what a process has sent instead of an answer

    def __init__(self, number: int, rows: range) -> None:
        self.number, self.rows = number, rows
        self.pending: deque[Request] = deque()
        self.since = 0.0  # when the worker began with the first of them
        self.lost: dict[int, Any] = {}  # environments whose lost episode was not reported yet: options of the next
        self.changed: dict[int, Any] = {}  # options of the next episodes that the worker does not know yet

    @property
    def place(self) -> tuple[int, int]:
        """Environment that the worker steps or resets, and its episode seed; -1 if there is none."""
        return (int(self.slots.place[0]), int(self.slots.place[1])) if self.is_attached else (-1, -1)

    def ask(self, request: Request) -> None:
        """Queue a request."""
        if not self.pending:
            self.since = time.monotonic()
        self.pending.append(request)
        self._put(request)

    def _put(self, request: Request) -> None:
        raise NotImplementedError

    def take_changed(self) -> dict[int, Any] | None:
        """Return the options that the worker does not know yet, and forget them."""
        changed, self.changed = self.changed, {}
        return changed or None


class ThreadWorker(Worker):
    """Worker that is a daemon thread."""

    exitcode = None

    def __init__(self, number: int, rows: range, build: Build, bell: queue.SimpleQueue[None], name: str) -> None:
        super().__init__(number, rows)
        self.bell = bell
        self._build, self._requests = build, queue.SimpleQueue[Any]()
        self._answers: deque[Answer] = deque()
        self._thread = threading.Thread(target=self._run, name=f"rein worker {number} of {name}", daemon=True)

    def start(self) -> None:
        """Start the thread. Its first answer is `About`."""
        self.since = time.monotonic()
        self.pending.append(Request("about", ()))
        self._thread.start()

    def attach(self, about: About) -> None:
        """Make the slots."""
        self.slots, self.is_attached = Slots(about, len(self.rows)), True
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
            block = Block(self._build, self.rows)
            answer = Answer(block.about())
        except BaseException as error:  # returned
            block, answer = None, failure(error)
        self._reply(answer)
        if block is None:
            return
        while isinstance(request := self._requests.get(), Slots | Request):
            if isinstance(request, Slots):
                block.attach(request)
            else:
                self._reply(block.answer(request))
        try:
            block.close()
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

    def __init__(self, number: int, rows: range, build: Build, name: str) -> None:
        super().__init__(number, rows)
        context = multiprocessing.get_context()
        mine, self._theirs = context.Pipe()
        self.pipe = Pipe(mine, PICKLE + b"".join(_ANSWERS))
        _parent_ends.add(self.pipe)
        forked = context.get_start_method() == "fork"
        inherited = [*_parent_ends] if forked else []
        # The kernel's "parent" is the thread that starts a process. Processes must survive the end of other threads.
        ends_with_parent = threading.current_thread() is threading.main_thread()
        make_block: Any = functools.partial(Block, build, rows)
        args = (self._theirs, inherited, CloudpickleWrapper(make_block), os.getpid())
        self._process = context.Process(  # type: ignore[attr-defined]  # every context has it
            target=serve, args=(*args, ends_with_parent), name=f"rein worker {number} of {name}", daemon=True
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
        descriptor = shared_memory(Slots(about, len(self.rows)).nbytes)
        try:
            self.slots, self.is_attached = Slots(about, len(self.rows), mmap.mmap(descriptor, 0)), True
            with contextlib.suppress(*_BROKEN_PIPE):  # found out by `receive`
                self.pipe.put_descriptor(descriptor)
        finally:
            os.close(descriptor)
        self.pipe.put(dumps(about))

    def _put(self, request: Request) -> None:
        self.pipe.put(_encoded(request))

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
            answer = _ANSWERS.get(data) or loads(data)
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


def serve(
    pipe: connection.Connection,
    inherited: Sequence[Pipe],
    make_block: Callable[[], Block],
    parent: int,
    ends_with_parent: bool,
) -> None:
    """Answer the requests of a pipe until its other end closes, or until the process `parent` has ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all processes
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a handler of the main process is inherited
    if ends_with_parent and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for one in inherited:
        one.close()
    torch.set_num_threads(1)
    masks.logger.disabled = True  # the parent logs the warning about masks
    try:
        block = make_block()
        pipe.send_bytes(dumps(Answer(block.about())))
    except BaseException as error:  # sent to the parent
        with contextlib.suppress(*_BROKEN_PIPE):
            pipe.send_bytes(_pickled(failure(error)))
        return
    with contextlib.suppress(*_BROKEN_PIPE):  # the parent has ended or has given up
        memory = _received_memory(pipe, parent)
        block.attach(Slots(_received(pipe, parent), len(block.rows), memory))
        while True:
            request: Request = _received(pipe, parent)
            answer = block.answer(request)
            if request.method == "step" and answer.options is None and answer.trace is None:
                pipe.send_bytes(b"1" if answer.value else b"0")
            else:
                pipe.send_bytes(_pickled(answer))
    block.close()


def _received_memory(pipe: connection.Connection, parent: int) -> mmap.mmap:
    """Return the memory whose descriptor the parent sends first."""
    _await_parent(pipe, parent)
    with socket.fromfd(pipe.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as end:
        _, descriptors, *_ = socket.recv_fds(end, 1, 1)
    if not descriptors:
        raise EOFError("the parent has closed the pipe")
    try:
        return mmap.mmap(descriptors[0], 0)
    finally:
        os.close(descriptors[0])


def _received(pipe: connection.Connection, parent: int) -> Any:
    """Return the next message of the parent. Raises EOFError if the pipe is closed or the parent has ended."""
    _await_parent(pipe, parent)
    return _decoded(pipe.recv_bytes())


def _await_parent(pipe: connection.Connection, parent: int) -> None:
    poller = select.poll()
    poller.register(pipe.fileno(), select.POLLIN)
    while not poller.poll(1000):
        if os.getppid() != parent:
            raise EOFError("the parent has ended")
