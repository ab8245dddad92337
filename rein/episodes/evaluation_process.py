"""Evaluate the policy of an agent in a separate process.

The process is a new Python interpreter. Requests come from its standard input, and answers go to its standard output.
It ends as soon as its standard input is closed, also during an evaluation, so it never outlives its parent.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import queue
import subprocess
import sys
import threading
import traceback
import weakref
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch

from rein.envs.host.processes import ending, refuse_on_windows
from rein.envs.host.server import dumps, loads
from rein.envs.host.worker import CloudpickleWrapper
from rein.episodes.evaluation import Evaluation, evaluate
from rein.ops.trees import to_device

_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
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
        policy: Policy of a `rein.Agent`. The process builds another one, and each request has its parameters.
        environment: Environment. The process gets a copy of it.

    Raises:
        TypeError: If the policy is not of a `rein.Agent`, or if it or the environment cannot be pickled.
    """

    def __init__(self, policy: Any, environment: Any) -> None:
        refuse_on_windows("background=True", "background=False")
        if not hasattr(policy, "builder"):
            raise TypeError(
                f"background=True: the process cannot build {type(policy).__name__}; give a subclass of rein.Agent or "
                "its policy"
            )
        try:
            self._parts = _packed((policy.builder(environment.device), environment))
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
            theirs, self._requests = multiprocessing.Pipe(duplex=False)
            self._results, theirs_too = multiprocessing.Pipe(duplex=False)
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _PROGRAM, json.dumps(sys.path)],
                stdin=theirs.fileno(),
                stdout=theirs_too.fileno(),
                start_new_session=True,  # a terminal sends Ctrl-C to all processes of a session
            )
            theirs.close()
            theirs_too.close()
            self._end = weakref.finalize(self, _kill, self._process)
            first = [self._parts, _packed(state)]
        messages = [*first, _packed((snapshot, options))]  # a copy, because training goes on
        self._answers = queue.SimpleQueue()
        threading.Thread(
            target=_exchange, args=(self._requests, self._results, messages, self._answers), daemon=True
        ).start()

    def answer(self, seconds: float = 0.0) -> Answer | None:
        """Return the answer to the request, or None if there is none after `seconds`."""
        process: Any = self._process
        ended = process.poll() is not None  # asked first: the last answer may be on its way
        try:
            answer = self._answers.get(timeout=max(seconds, float(ended)))
        except queue.Empty:
            if not ended:
                return None
            answer = None  # a process that the environment started holds the pipe
        return Answer(ending=ending(process.wait())) if answer is None else answer

    def close(self) -> None:
        """Kill the process if it runs. A request without an answer is lost."""
        if self._process is not None:
            self._end()
            self._process = None


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def _packed(value: Any) -> bytes:
    """Return pickled data, also of functions and classes of the main program."""
    return dumps(CloudpickleWrapper(value))


def _unpacked(data: bytes) -> Any:
    return loads(data).fn


def _exchange(
    requests: Connection, results: Connection, messages: list[bytes], answers: queue.SimpleQueue[Answer | None]
) -> None:
    """Send messages and put the answer, or None if the process ends without one. Runs in a thread, because it waits."""
    try:
        for message in messages:
            requests.send_bytes(message)
        answers.put(_unpacked(results.recv_bytes()))
    except (OSError, EOFError):  # the process has ended
        answers.put(None)
    except Exception:  # unpickling runs code of custom classes
        answers.put(Answer(error=traceback.format_exc()))


def serve() -> None:
    """Answer the requests on standard input until it closes. Runs in the process."""
    output = Connection(os.dup(1), readable=False)
    os.dup2(2, 1)  # the environment may print
    torch.set_num_threads(1)
    messages: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(messages,), daemon=True).start()
    parts, failure = None, b""
    try:
        build, environment = _unpacked(messages.get())
        made = build(), environment
        _load(made, _unpacked(messages.get()))
        parts = made
    except Exception:  # sent to the parent
        failure = _packed(Answer(error=traceback.format_exc()))
    while True:
        request = messages.get()
        output.send_bytes(failure if parts is None else _evaluated(parts, request))


def _receive(messages: queue.SimpleQueue[bytes]) -> None:
    """Receive messages until the parent closes the pipe or ends. Then the process ends immediately."""
    requests = Connection(0, writable=False)
    try:
        while True:
            messages.put(requests.recv_bytes())
    finally:
        os._exit(0)


def _load(parts: tuple[Any, Any], states: list[Any] | None) -> None:
    for part, state in zip(parts, states or (), strict=False):
        if state is not None:
            part.load_state_dict(state)


def _evaluated(parts: tuple[Any, Any], request: bytes) -> bytes:
    """Return a packed answer."""
    policy, environment = parts
    try:
        snapshot, options = _unpacked(request)
        policy.load_snapshot(snapshot)
        result = to_device(evaluate(policy, environment, **options), _CPU)
        states = [part.state_dict() if hasattr(part, "state_dict") else None for part in parts]
        return _packed(Answer(result, to_device(states, _CPU)))
    except Exception:  # sent to the parent
        return _packed(Answer(error=traceback.format_exc()))
