"""The worker's side of a pool: answers to the requests of the main process, for the simulators of one worker.

Actions, observations, rewards and flags are in `Slots`. Those of a process are shared memory without a name.

Shapes: W simulators of a worker, N their rows, R some of these, A one action, O one observation.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import select
import socket
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import connection
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from rein.envs.host.block import About, Block, Setup
from rein.envs.host.processes import Pipe, begin_worker
from rein.ops.trees import map_tree
from rein.spaces import map_space
from rein.spaces.conversion import layout
from rein.types import TimeStep, Tree

_BROKEN_PIPE = (EOFError, OSError)


class Request(NamedTuple):
    """Request to a worker: a method of `Server`, and its arguments."""

    method: str
    args: tuple[Any, ...]
    chosen: Sequence[int] = ()  # simulators of a step
    steps: int = 1  # number of times that the worker steps or resets its simulators


class Answer(NamedTuple):
    """Answer of a worker."""

    value: Any = None
    options: list[tuple[int, dict[str, Any] | None]] | None = None  # of the episodes that have begun
    error: BaseException | bytes | None = None  # pickled by a process
    trace: str | None = None  # traceback of an error


class Slots:
    """Arrays of W simulators for actions and results, in `memory` or, without it, in new memory."""

    def __init__(self, setup: Setup, about: About, count: int, memory: mmap.mmap | None = None) -> None:
        self._memory, self.nbytes = memory, 0
        self._missing = setup.info
        lead = (count * about.rows,)
        self.action = self._tree(about.action_space, lead)
        self.observation, self.final = (self._tree(about.observation_space, lead) for _ in range(2))
        self.info = {key: self._array((*lead, *value.shape), value.dtype) for key, value in setup.info.items()}
        self.reward = self._array(lead, np.dtype(np.float32))
        self.flags = self._array((3, *lead), np.dtype(np.bool_))  # terminated, truncated, valid
        self.alive = self._array(lead, np.dtype(np.bool_))  # rows of agents that have not left
        self.index, self.seed = (self._array((count,), np.dtype(np.int64)) for _ in range(2))  # of the current episodes
        self.place = self._array((2,), np.dtype(np.int64))  # simulator that is stepped or reset, and its episode seed
        self.place[:] = -1

    def _tree(self, space: spaces.Space[Any], lead: tuple[int, ...]) -> Tree:
        return map_space(lambda part: self._array((*lead, *layout(part)[0]), layout(part)[1]), space)

    def _array(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
        begin = -(-self.nbytes // 64) * 64
        self.nbytes = begin + max(1, math.prod(shape) * dtype.itemsize)
        return np.zeros(shape, dtype) if self._memory is None else np.ndarray(shape, dtype, self._memory, begin)

    def put_step(self, rows: Any, time_step: TimeStep, ended: bool) -> None:
        """Set the result of a step of the rows `rows` (R,), or of all for a slice."""
        _put(self.observation, rows, time_step.observation)
        if ended:
            _put(self.final, rows, time_step.final_observation)
        self.reward[rows] = time_step.reward.numpy()
        for flag, values in enumerate((time_step.terminated, time_step.truncated, time_step.valid)):
            self.flags[flag, rows] = values.numpy()
        for key, values in time_step.info.items():
            self.info[key][rows] = values.numpy()

    def put_lost(self, rows: Sequence[int], last: Tree, alive: np.ndarray[Any, Any]) -> None:
        """Set the result of rows (R,) whose episodes were lost: truncated after `last` (R, *O), not valid.

        `alive` (R,) is False for agents that had left.
        """
        chosen = np.array(rows, np.int64)
        _put(self.final, chosen, last)
        self.reward[chosen] = 0.0
        self.flags[:, chosen] = np.stack([np.zeros_like(alive), alive, np.zeros_like(alive)])
        for key, missing in self._missing.items():
            self.info[key][chosen] = missing


def _put(arrays: Tree, rows: Any, values: Tree) -> None:
    if isinstance(arrays, dict):
        for key, part in arrays.items():
            _put(part, rows, values[key])
    else:
        arrays[rows] = values.numpy()


class Server:
    """Simulators of one worker, and the methods that requests call."""

    def __init__(self, setup: Setup, numbers: range) -> None:
        self.block = Block(setup, numbers)
        self._all = range(len(numbers))

    def attach(self, slots: Slots) -> None:
        """Set the place of actions and results."""
        self._slots, self.block.place = slots, slots.place
        self._action = map_tree(torch.from_numpy, slots.action)

    def answer(self, request: Request) -> Answer:
        """Call the method of a request. Errors are returned."""
        try:
            return getattr(self, request.method)(*request.args)
        except BaseException as error:  # returned
            return failure(error)

    def step(self, chosen: Sequence[int] | None, changed: Mapping[int, Any] | None) -> Answer:
        """Step some simulators, or all for None. The value is whether an episode of one has ended."""
        self._change(changed)
        if chosen is None:
            chosen, rows, action = self._all, slice(None), self._action
        else:
            rows = np.array(self.block.rows_of(chosen), np.int64)
            action = map_tree(lambda x: x[torch.from_numpy(rows)], self._action)
        time_step = self.block.step(action, chosen)
        ended = time_step.final_observation is not time_step.observation
        self._slots.put_step(rows, time_step, ended)
        self._slots.alive[:] = self.block.alive
        return Answer(ended, self._begun(chosen) if ended else None)

    def begin(self, seeds: tuple[Any, ...], options: dict[str, Any], current: Any, keep_options: bool) -> Answer:
        """Begin the next episodes, or those with the seeds `current` and, with `keep_options`, the current options.

        The value is whether the infos have masks that are not used.
        """
        block = self.block
        block.seeds.set_part(*seeds)
        block.options.load_state_dict(options)
        if current is not None:
            current = block.seeds.override(torch.tensor(current, dtype=torch.int64, device="cpu"))
        self._put(block.begin(current, keep_options))
        return Answer(block.has_unused_masks, self._begun(self._all))

    def begin_some(self, chosen: Sequence[int], changed: Mapping[int, Any] | None) -> Answer:
        """Begin the next episodes of some simulators."""
        self._change(changed)
        self._put(self.block.begin_some(chosen))
        return Answer(None, self._begun(chosen))

    def save(self) -> Answer:
        """The value is the state of the action history, as arrays."""
        return Answer(as_arrays(self.block.save()))

    def load(self, seeds: Any, options: dict[str, Any], state: Any) -> Answer:
        """Load a state, and repeat its episodes."""
        self.block.seeds.load_state_dict(_as_tensors(seeds))
        self.block.options.load_state_dict(options)
        self._put(self.block.load(_as_tensors(state)))
        return Answer(None, self._begun(self._all))

    def render(self, index: int) -> Answer:
        """The value is a frame."""
        return Answer(self.block.render(index))

    def close(self) -> None:
        """Close the simulators."""
        self.block.close()

    def _put(self, observation: Tree) -> None:
        """Set the current observations of all rows."""
        _put(self._slots.observation, slice(None), observation)
        self._slots.alive[:] = self.block.alive

    def _change(self, changed: Mapping[int, Any] | None) -> None:
        if changed is not None:
            self.block.options.set([*changed.values()], changed)

    def _begun(self, chosen: Sequence[int]) -> list[tuple[int, dict[str, Any] | None]] | None:
        """Set the indices and seeds of the current episodes. Returns the options of `chosen`, if any are used."""
        block = self.block
        seeds, options = block.seeds.part(self._all), block.options
        self._slots.index[:], self._slots.seed[:] = seeds[1:]
        return [(index, options.of(index)) for index in chosen] if options.current is not None else None


def as_arrays(tree: Any) -> Any:
    """Return a tree with arrays in the place of tensors, which are pickled faster."""
    return map_tree(lambda x: x.numpy() if isinstance(x, Tensor) else x, tree)


def _as_tensors(tree: Any) -> Any:
    return map_tree(lambda x: torch.from_numpy(x) if isinstance(x, np.ndarray) else x, tree)


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
_STEP_ALL, _STEP, ANSWERS = b"*", b"+", {b"0": Answer(False), b"1": Answer(True)}


def encoded(request: Request) -> bytes:
    """Return a request as bytes."""
    if request.method != "step" or request.args[1] is not None:
        return dumps(request)
    return _STEP_ALL if isinstance(request.chosen, range) else _STEP + np.array(request.chosen, np.int64).tobytes()


def _decoded(data: bytes) -> Any:
    if data[:1] not in (_STEP_ALL, _STEP):
        return loads(data)
    return Request("step", (None if data == _STEP_ALL else np.frombuffer(data[1:], np.int64).tolist(), None))


def serve(
    pipe: connection.Connection,
    inherited: Sequence[Pipe],
    make_server: Callable[[], Server],
    parent: int,
    ends_with_parent: bool,
) -> None:
    """Answer the requests of a pipe until its other end closes, or until the process `parent` has ended."""
    begin_worker(ends_with_parent)
    for one in inherited:
        one.close()
    torch.set_num_threads(1)
    try:
        server = make_server()
        pipe.send_bytes(dumps(Answer(server.block.about)))
    except BaseException as error:  # sent to the parent
        with contextlib.suppress(*_BROKEN_PIPE):
            pipe.send_bytes(_pickled(failure(error)))
        return
    with contextlib.suppress(*_BROKEN_PIPE):  # the parent has ended or has given up
        memory = _received_memory(pipe, parent)
        block = server.block
        server.attach(Slots(block.setup, block.about, len(block.numbers), memory))
        while True:
            request: Request = _received(pipe, parent)
            answer = server.answer(request)
            if request.method == "step" and answer.options is None and answer.trace is None:
                pipe.send_bytes(b"1" if answer.value else b"0")
            else:
                pipe.send_bytes(_pickled(answer))
    server.close()


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
