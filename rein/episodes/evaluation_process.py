"""Evaluate the policy of an agent in a process of its own.

The process is a new Python interpreter. Requests and answers are pickled to its standard input and from its standard
output. It ends as soon as its standard input is closed, also during an evaluation, so it never outlives its parent.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import subprocess
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from gymnasium.vector.utils import CloudpickleWrapper

from rein.envs.gymnasium.async_vector_env import ending
from rein.episodes.evaluation import Evaluation, evaluate
from rein.ops.trees import to_device

_PROGRAM = (
    "import pickle, sys; sys.path[:] = pickle.load(sys.stdin.buffer); "
    "from rein.episodes.evaluation_process import serve; serve()"
)
_CPU = torch.device("cpu")


class Answer(NamedTuple):
    """Answer to a request. Exactly one of `result`, `error` and `ending` is set."""

    result: Evaluation | None = None
    state: list[Any] | None = None  # of policy and environment, after the evaluation
    error: str | None = None  # traceback of an exception of the policy or the environment
    ending: str | None = None  # how the process ended without an answer


class EvaluationProcess:
    """Process that evaluates a policy in an environment, one request at a time.

    The process starts with the first request, and again with the next request after it has ended.

    Args:
        build: Function that builds the policy. `load_snapshot` of the policy gets the parameters of each request.
        environment: Environment. The process gets a copy of it.

    Raises:
        TypeError: If the policy or the environment cannot be pickled.
    """

    def __init__(self, build: Callable[[], Any], environment: Any) -> None:
        try:
            self._parts = pickle.dumps(CloudpickleWrapper((build, environment)))  # type: ignore[arg-type]  # any object
        except Exception as error:  # custom objects may raise anything
            kind = type(environment).__name__
            raise TypeError(
                f"background=True: the agent or the environment ({kind}) cannot be sent to another process: {error}; "
                "use environments without workers or open files, or background=False"
            ) from error
        self._process: subprocess.Popen[bytes] | None = None
        self._answers: queue.SimpleQueue[Answer | None] = queue.SimpleQueue()  # of the current request

    @property
    def pid(self) -> int | None:
        """Id of the process, or None if it does not run."""
        return None if self._process is None else self._process.pid

    def request(self, snapshot: Mapping[str, Any], state: list[Any] | None, options: Mapping[str, Any]) -> None:
        """Request an evaluation with the parameters of `snapshot` and the `options` of `rein.evaluate`.

        `state` is the state of policy and environment in the last answer. Only a new process loads it.
        """
        first = []
        if self._process is None or self._process.poll() is not None:
            self.close()
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _PROGRAM],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,  # a terminal sends Ctrl-C to all processes of a session
            )
            self._end = weakref.finalize(self, _kill, self._process)
            first = [sys.path, self._parts, pickle.dumps(state)]
        messages = [*first, pickle.dumps((snapshot, options))]  # a copy, because training goes on
        self._answers = queue.SimpleQueue()
        threading.Thread(target=_exchange, args=(self._process, messages, self._answers), daemon=True).start()

    def answer(self, seconds: float = 0.0) -> Answer | None:
        """Return the answer to the request, or None if there is none after `seconds`."""
        process: Any = self._process
        ended = process.poll() is not None  # asked first: the last answer may be on its way
        try:
            found = self._answers.get(timeout=max(seconds, float(ended)))
        except queue.Empty:
            if not ended:
                return None
            found = None  # a process that the environment started holds the pipe
        return Answer(ending=ending(process.wait())) if found is None else found

    def close(self) -> None:
        """Kill the process if it runs. A request without an answer is lost."""
        if self._process is not None:
            self._end()
            self._process = None


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):  # data of a request was not sent
            stream.close()  # type: ignore[union-attr]  # both are pipes


def _exchange(process: Any, messages: list[Any], answers: queue.SimpleQueue[Answer | None]) -> None:
    """Send messages and put the answer, or None if the process ends without one. Runs in a thread, because it waits."""
    try:
        for message in messages:
            pickle.dump(message, process.stdin)
        process.stdin.flush()
        answers.put(pickle.load(process.stdout))
    except (OSError, ValueError, EOFError, pickle.UnpicklingError):  # the process has ended, or its pipes are closed
        answers.put(None)


def serve() -> None:
    """Answer the requests on standard input until it closes. Runs in the process."""
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # the environment may print
    torch.set_num_threads(1)
    messages: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(messages,), daemon=True).start()
    parts, failure = None, Answer()
    try:
        build, environment = pickle.loads(messages.get()).fn
        made = build(), environment
        _load(made, pickle.loads(messages.get()))
        parts = made
    except Exception:  # sent to the parent
        failure = Answer(error=traceback.format_exc())
    while True:
        request = messages.get()
        pickle.dump(failure if parts is None else _evaluated(parts, request), output)
        output.flush()


def _receive(messages: queue.SimpleQueue[bytes]) -> None:
    """Receive messages until the parent closes the pipe or ends. Then the process ends immediately."""
    try:
        while True:
            messages.put(pickle.load(sys.stdin.buffer))
    finally:
        os._exit(0)


def _load(parts: tuple[Any, Any], states: list[Any] | None) -> None:
    for part, state in zip(parts, states or (), strict=False):
        if state is not None:
            part.load_state_dict(state)


def _evaluated(parts: tuple[Any, Any], request: bytes) -> Answer:
    policy, environment = parts
    try:
        snapshot, options = pickle.loads(request)
        policy.load_snapshot(snapshot)
        result = to_device(evaluate(policy, environment, **options), _CPU)
        states = [part.state_dict() if hasattr(part, "state_dict") else None for part in parts]
        return Answer(result, to_device(states, _CPU))
    except Exception:  # sent to the parent
        return Answer(error=traceback.format_exc())
