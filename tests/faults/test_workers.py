"""Workers of environments that are killed, crash, hang or lose their parent at random moments."""

from __future__ import annotations

import contextlib
import functools
import gc
import io
import logging
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rein
from rein.envs.host.server import Server
from tests.faults.fragile import CRASHES, EXITS, FINE, HANGS, Fragile, number_of
from tests.integrations.faulty import Faulty, fill, stops_in_an_answer, writes_garbage
from tests.workers import in_workers

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork:DeprecationWarning")

ROOT = Path(__file__).parents[2]
N = 4
NOTHING = torch.full((N,), FINE)
ONES = torch.ones(N, dtype=torch.int64)


def check_step(last: torch.Tensor, time_step: rein.TimeStep, seeds: torch.Tensor) -> int:
    """Check that no transition joins two episodes. Returns the number of lost episodes."""
    valid, ended = time_step.valid, time_step.terminated | time_step.truncated
    assert (time_step.truncated == ~valid).all()
    assert torch.equal(time_step.final_observation[valid], last[valid] + torch.tensor([1.0, 0.0]))
    assert torch.equal(time_step.final_observation[~valid], last[~valid])
    assert torch.equal(time_step.observation[~ended], time_step.final_observation[~ended])
    for row in ended.nonzero().flatten().tolist():
        drawn = number_of(np.random.Generator(np.random.PCG64(int(seeds[row]))))
        assert time_step.observation[row].tolist() == [0.0, float(np.float32(drawn))]
    return int((~valid).sum())


def test_killed_workers_are_replaced_and_no_transition_joins_two_episodes(scale: Callable[[int, int], int]) -> None:
    kills, chance, steps = scale(200, 9), random.Random(0), 0
    environment = in_workers(Fragile, N, 0, workers=2, on_failure="restart", max_restarts=kills)
    last = environment.reset()
    noticed = []
    while environment.restarts < kills:
        steps += 1
        kind, before = chance.choice(["kill", "exit", "crash", "nothing"]), environment.restarts
        action, row = NOTHING.clone(), chance.randrange(N)
        if kind in ("exit", "crash"):
            action[row] = EXITS if kind == "exit" else CRASHES
        environment.send(action, [*range(N)])
        if kind == "kill":
            if chance.random() < 0.5:
                time.sleep(chance.random() * 1e-3)  # the worker may be anywhere in its step
            with contextlib.suppress(ProcessLookupError):  # it has been killed and collected already
                os.kill(environment._transport._workers[row // 2].pid or 0, signal.SIGKILL)
        began, rows, lost = time.perf_counter(), 0, 0
        while rows < N:
            received, time_step = environment.receive()
            lost += check_step(last[received], time_step, environment.episode_seeds[received])
            last[received] = time_step.observation
            rows += len(received)
        assert lost == 2 * (environment.restarts - before)
        if environment.restarts > before:
            noticed.append(time.perf_counter() - began)
    environment.close()
    print(f"workers: {kills} kills in {steps} steps; the step with the restart took {np.median(noticed) * 1e3:.0f} ms")
    assert not multiprocessing.active_children()


def test_hanging_workers_are_replaced(scale: Callable[[int, int], int]) -> None:
    hangs, chance = scale(20, 2), random.Random(1)
    environment = in_workers(Fragile, N, 0, workers=2, timeout=0.5, on_failure="restart", max_restarts=1000)
    last, lost = environment.reset(), 0
    for number in range(hangs):
        if number % 2:
            os.kill(environment._transport._workers[chance.randrange(2)].pid or 0, signal.SIGSTOP)
            action = NOTHING
        else:
            action = NOTHING.clone()
            action[chance.randrange(N)] = HANGS
        for each in (action, NOTHING):
            time_step = environment.apply_action(each)
            lost += check_step(last, time_step, environment.episode_seeds)
            last = time_step.observation
    assert lost == 2 * environment.restarts >= 2 * hangs
    environment.close()
    print(f"workers: {hangs} hangs, {environment.restarts} restarts")


def step_forever(ready: int) -> None:
    environment = in_workers(Fragile, N, 0, workers=2)
    environment.reset()
    os.write(ready, b"1")
    while True:
        environment.apply_action(NOTHING)


@pytest.mark.skipif(sys.platform != "linux", reason="Linux ends processes with their parent")
def test_workers_end_with_a_killed_parent(scale: Callable[[int, int], int]) -> None:
    """The workers inherit the writing end of a pipe, which is at its end when all of them have ended."""
    chance, count, shared = random.Random(2), scale(20, 3), {*os.listdir("/dev/shm")}
    for _ in range(count):
        reading, writing = os.pipe()
        if (parent := os.fork()) == 0:
            try:
                step_forever(writing)
            finally:
                os._exit(1)
        os.close(writing)
        assert os.read(reading, 1) == b"1"
        time.sleep(chance.random() * 0.02)  # the parent and its workers may be anywhere in a step
        os.kill(parent, signal.SIGKILL)
        assert os.read(reading, 1) == b""
        os.close(reading)
        os.waitpid(parent, 0)
    assert {*os.listdir("/dev/shm")} <= shared
    print(f"workers: {count} parents killed, no process and no shared memory left")


EXIT = """
import torch
from rein.envs import GymnasiumEnvironment
from tests.faults.fragile import HANGS, Fragile

for mode in ("processes", "threads"):
    environment = GymnasiumEnvironment(Fragile, 4, 0, workers=2, mode=mode)
    environment.reset()
    environment.send(torch.full((4,), HANGS), [*range(4)])
    globals()[mode] = environment
"""


def test_interpreter_exits_while_workers_hang() -> None:
    done = subprocess.run([sys.executable, "-c", EXIT], cwd=ROOT, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert "was killed" in done.stderr
    assert "was abandoned" in done.stderr
    assert "Traceback" not in done.stderr


def test_abandoned_threads_do_not_change_later_results(scale: Callable[[int, int], int]) -> None:
    """A thread that answers after its replacement has no effect."""
    gate = threading.Event()

    class Waits(Fragile):
        def step(self, action: Any) -> Any:
            if action == HANGS:
                gate.wait()
            return super().step(FINE)

    environment = in_workers(Waits, N, 0, workers=2, mode="threads", timeout=0.3, on_failure="restart")
    last, abandoned = environment.reset(), []
    action = NOTHING.clone()
    action[0] = HANGS
    for each in [action, NOTHING] * scale(5, 1):
        abandoned += [environment._transport._workers[0]]
        time_step = environment.apply_action(each)
        check_step(last, time_step, environment.episode_seeds)
        last = time_step.observation
    gate.set()
    assert all(
        worker.join(time.monotonic() + 60.0) for worker in abandoned if worker not in environment._transport._workers
    )
    time_step = environment.apply_action(NOTHING)
    check_step(last, time_step, environment.episode_seeds)
    environment.close()


OPERATIONS: dict[str, Callable[[Any], object]] = {
    "begin": lambda environment: environment.reset(),
    "step": lambda environment: environment.apply_action(ONES),
    "begin_some": lambda environment: environment.reset_where(torch.ones(N, dtype=torch.bool)),
    "render": lambda environment: environment.render(3),
    "save": lambda environment: environment.state_dict(),
    "load": lambda environment: environment.load_state_dict(environment.saved),
}


def begun(**options: Any) -> Any:
    """Return environments with the state `saved`, whose second worker has made steps."""
    environment: Any = in_workers(Faulty, N, 0, workers=2, **options)
    environment.reset()
    environment.apply_action(ONES)
    environment.saved = environment.state_dict()
    return environment


def break_answers(monkeypatch: pytest.MonkeyPatch, method: str, fault: Callable[[], None], armed: Path) -> None:
    """Let the second worker call `fault` before one answer to a method, if the file `armed` exists."""
    usual = Server.answer

    def answer(self: Server, request: Any) -> Any:
        if request.method == method and self.block.numbers.start == 2 and armed.exists():
            armed.unlink()
            fault()
        return usual(self, request)

    monkeypatch.setattr(Server, "answer", answer)


@pytest.mark.default_cases(every=5)
@pytest.mark.parametrize("on_failure", ["raise", "restart"])
@pytest.mark.parametrize("fault", [stops_in_an_answer, writes_garbage])
@pytest.mark.parametrize("method", OPERATIONS)
def test_worker_that_breaks_in_an_answer_is_noticed(
    method: str, fault: Any, on_failure: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stops = fault is stops_in_an_answer
    break_answers(monkeypatch, method, fault, tmp_path / "armed")
    environment = begun(timeout=0.3 if stops else None, on_failure=on_failure)
    (tmp_path / "armed").touch()
    check_failure(environment, method, rein.errors.WorkerTimeout if stops else rein.errors.WorkerError)


@pytest.mark.default_cases("step-raise", "save-restart", "load-restart")
@pytest.mark.parametrize("on_failure", ["raise", "restart"])
@pytest.mark.parametrize("method", OPERATIONS)
def test_worker_that_does_not_read_is_noticed(method: str, on_failure: Any) -> None:
    environment = begun(timeout=0.3, on_failure=on_failure)
    worker = environment._transport._workers[1]
    fill(worker.pid, worker.pipe.fileno())
    check_failure(environment, method, rein.errors.WorkerTimeout)


def check_failure(environment: Any, method: str, error: type[rein.errors.WorkerError]) -> None:
    """Check that the method raises the error with its place, or succeeds with a new worker."""
    seeds = environment.episode_seeds[2:].tolist()
    if environment.config["workers"]["on_failure"] == "raise":
        with pytest.raises(rein.errors.WorkerError, match="worker 1 of 2") as caught:
            OPERATIONS[method](environment)
        assert type(caught.value) is error
        places = (
            f"environments 2 to 3, episode seeds {seeds}",
            "environment 2, episode seed",
        )  # before or in its first step
        assert any(place in str(caught.value) for place in places)
        with pytest.raises(RuntimeError, match="build a new one"):
            environment.reset()
    else:
        OPERATIONS[method](environment)
        assert environment.restarts == 1
        environment.apply_action(ONES)
    environment.close()
    assert not multiprocessing.active_children()


def kill(environment: Any, number: int) -> None:
    os.kill(environment._transport._workers[0].pid, number)


def failing(environment: Any, action: int, error: type[Exception], rows: int = N) -> None:
    environment.reset()
    with pytest.raises(error):
        environment.apply_action(torch.full((rows,), action))


STATES: dict[str, Callable[[Any], object]] = {
    "new": lambda environment: None,
    "at rest": lambda environment: environment.reset(),
    "steps sent": lambda environment: (environment.reset(), environment.send(NOTHING, [*range(N)])),
    "one step sent": lambda environment: (environment.reset(), environment.send(NOTHING[:1], [3])),
    "hangs": lambda environment: (environment.reset(), environment.send(torch.full((N,), HANGS), [*range(N)])),
    "timed out": lambda environment: failing(environment, HANGS, rein.errors.WorkerTimeout),
    "refused an action": lambda environment: failing(environment, FINE, rein.errors.EnvironmentContractError, N + 1),
    "closed": lambda environment: (environment.reset(), environment.close()),
}
OF_PROCESSES: dict[str, Callable[[Any], object]] = {
    "killed at rest": lambda environment: (environment.reset(), kill(environment, signal.SIGKILL)),
    "killed in a step": lambda environment: (STATES["steps sent"](environment), kill(environment, signal.SIGKILL)),
    "exited": lambda environment: failing(environment, EXITS, rein.errors.WorkerDied),
    "stopped": lambda environment: (environment.reset(), kill(environment, signal.SIGSTOP)),
}


@pytest.mark.slow
@pytest.mark.parametrize("deleted", [False, True])
@pytest.mark.parametrize("mode", ["processes", "threads"])
def test_close_returns_from_every_state(mode: Any, deleted: bool) -> None:
    for name, reach in (STATES if mode == "threads" else STATES | OF_PROCESSES).items():
        environment = in_workers(Fragile, N, 0, workers=2, mode=mode, timeout=0.5)
        reach(environment)
        began = time.perf_counter()
        if deleted:
            del environment
            gc.collect()
        else:
            environment.close()
            environment.close()
        assert time.perf_counter() - began < 10.0, name  # documented: 5 s
        assert not multiprocessing.active_children(), name


def test_close_returns_if_a_worker_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rein.envs.host.pool._GRACE", 0.2)
    environment = begun()
    worker = environment._transport._workers[1]
    fill(worker.pid, worker.pipe.fileno())
    environment.close()
    assert not multiprocessing.active_children()


def close_without_exit_codes(writing: int) -> None:
    """Close workers while SIGCHLD is ignored, and write the messages that are logged."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    log = io.StringIO()
    logging.getLogger("rein").addHandler(logging.StreamHandler(log))
    environment = in_workers(Fragile, N, 0, workers=2)
    environment.reset()
    environment.close()
    os.write(writing, f"{log.getvalue()}closed".encode())


def test_workers_close_if_sigchld_is_ignored() -> None:
    """The kernel then removes ended processes, and their exit codes are lost."""
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        try:
            close_without_exit_codes(writing)
        finally:
            os._exit(0)
    os.close(writing)
    assert os.read(reading, 1000) == b"closed"
    os.close(reading)
    os.waitpid(child, 0)


def test_worker_is_replaced_after_an_exception_without_text(caplog: pytest.LogCaptureFixture) -> None:
    class Unprintable(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

        __repr__ = __str__

    def raises_it() -> None:
        raise Unprintable

    for mode in ("processes", "threads"):
        options: Any = {"mode": mode, "on_failure": "restart", "max_restarts": 1}
        environment = in_workers(functools.partial(Faulty, raises_it), N, 0, workers=2, **options)
        environment.reset()
        for _ in range(3):
            time_step = environment.apply_action(ONES)
        assert environment.restarts == 1
        assert not time_step.valid[2:].any()
        environment.close()
