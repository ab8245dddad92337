"""Tests of environments in processes: results, and errors if a worker raises, dies or hangs."""

from __future__ import annotations

import functools
import gc
import logging
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv, VectorWrapper

import rein
from rein.envs.gymnasium import GymnasiumEnvironment, GymnasiumVectorEnvironment
from rein.ops.random import episode_seeds
from rein.testing.stateful import first_difference

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*(Worker-|Traceback|Raising the last exception|waiting for a pending call)"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork:DeprecationWarning"),
]

ROOT = Path(__file__).parents[2]
N = 3
SHORT = 2.0  # seconds before a worker counts as hung; enough for the others on a busy machine
ZEROS = torch.zeros(N, dtype=torch.int64)


class Counter(gymnasium.Env[Any, Any]):
    """Environment that observes its step count. Workers with an index in `who` call `fault()` at the place `where`."""

    observation_space = spaces.Box(0.0, 100.0, (1,))
    action_space = spaces.Discrete(2)

    def __init__(
        self, fault: Callable[[], None] | None = None, where: str = "step", who: tuple[int, ...] = (1,)
    ) -> None:
        name = multiprocessing.current_process().name
        self.fault = fault if name.endswith(tuple(f">-{index}" for index in who)) else None
        self.where = where
        self.meet("making")

    def meet(self, place: str) -> None:
        if self.fault is not None and self.where == place:
            self.fault()

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        self.meet("reset")
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        if self.steps == 3:
            self.meet("step")
        return np.full(1, self.steps, np.float32), 1.0, False, False, {}

    def close(self) -> None:
        self.meet("close")


def exits() -> None:
    os._exit(3)


def is_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hangs() -> None:
    time.sleep(1000.0)


def is_killed_by_a_signal_without_name() -> None:
    os.kill(os.getpid(), signal.SIGRTMIN + 1)


def raises() -> None:
    raise ZeroDivisionError("the simulator divides by zero")


def raises_a_class_of_its_own() -> None:
    class Boom(Exception):
        pass

    raise Boom("the simulator is out of fuel")


def raises_with_a_function() -> None:
    raise ValueError("the simulator is out of fuel", lambda: 1)


def raises_what_takes_five_arguments() -> None:
    raise UnicodeDecodeError("utf8", b"x", 0, 1, "the simulator is out of fuel")


def in_processes(*fault: Any, timeout: float | None = None) -> GymnasiumVectorEnvironment:
    return GymnasiumVectorEnvironment.in_processes(functools.partial(Counter, *fault), N, seed=7, timeout=timeout)


def run(environment: GymnasiumVectorEnvironment) -> None:
    environment.reset()
    for _ in range(3):
        environment.apply_action(ZEROS)


def children() -> set[int]:
    return {process.pid for process in multiprocessing.active_children()}  # type: ignore[misc]  # they were started


@pytest.fixture(autouse=True)
def no_process_is_left() -> Iterator[None]:
    before = children()
    yield
    assert children() <= before


def seed_of(index: int) -> int:
    return int(episode_seeds(7, torch.tensor(index), torch.tensor(0)))


def test_in_processes_accepts_replayable_false() -> None:
    environment = GymnasiumVectorEnvironment.in_processes(Counter, N, seed=7, replayable=False)
    assert environment.replayable is False
    assert environment.config["make_kwargs"] == {}
    run(environment)
    environment.close()


def test_in_processes_replayable_raises_before_processes_start() -> None:
    before = children()
    with pytest.raises(ValueError, match=r"in_processes\(replayable=True\): .*; use GymnasiumEnvironment"):
        GymnasiumVectorEnvironment.in_processes(Counter, N, seed=7, replayable=True)
    assert children() == before


@pytest.mark.parametrize("where", ["reset", "step"])
@pytest.mark.parametrize(
    ("fault", "ending"),
    [
        (exits, "exit code 3"),
        (is_killed, "killed by SIGKILL"),
        (is_killed_by_a_signal_without_name, f"killed by signal {signal.SIGRTMIN + 1}"),
    ],
)
def test_dead_worker_raises_with_seed_and_exit_status(where: str, fault: Any, ending: str) -> None:
    environment = in_processes(fault, where)
    pid = environment._environment.processes[1].pid
    text = rf"Counter.*worker 1 of 3 \(pid {pid}, {ending}, episode seed {seed_of(1)}\) ended unexpectedly"
    with pytest.raises(rein.WorkerDied, match=text) as caught:
        run(environment)
    assert isinstance(caught.value.__cause__, EOFError | ConnectionError)


@pytest.mark.parametrize("where", ["reset", "step"])
def test_hanging_workers_raise_after_the_timeout(where: str) -> None:
    environment = in_processes(hangs, where, (0, 2), timeout=SHORT)
    with pytest.raises(rein.WorkerTimeout, match=r"worker 0 of 3 .* and worker 2 of 3 .*: no answer within 2 s") as e:
        run(environment)
    assert "worker 1" not in str(e.value)


def test_exception_in_a_worker_gets_a_note() -> None:
    environment = in_processes(raises)
    with pytest.raises(ZeroDivisionError, match="the simulator divides by zero") as caught:
        run(environment)
    assert any("worker 1 of 3 (pid " in note and f"seed {seed_of(1)}" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("where", ["reset", "step"])
@pytest.mark.parametrize("fault", [raises_a_class_of_its_own, raises_with_a_function, raises_what_takes_five_arguments])
def test_unpicklable_error_becomes_runtime_error_with_traceback(fault: Any, where: str) -> None:
    environment = in_processes(fault, where)
    with pytest.raises(RuntimeError, match=rf"(?s)in {fault.__name__}\n.*the simulator is out of fuel") as caught:
        run(environment)
    assert any("worker 1 of 3 (pid " in note and f"seed {seed_of(1)}" in note for note in caught.value.__notes__)


def test_unpicklable_error_in_a_foreign_worker_raises_worker_died() -> None:
    source = AsyncVectorEnv([functools.partial(Counter, raises_a_class_of_its_own)] * N)
    environment = GymnasiumVectorEnvironment(source, timeout=SHORT)
    with pytest.raises(
        rein.WorkerDied, match=r"worker 1 of 3 \(pid \d+, exit code 0\) raised an error that cannot be unpickled"
    ):
        run(environment)
    environment.close()


def test_keyboard_interrupt_ends_workers_and_the_next_call_raises(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupted(*args: Any) -> Any:
        raise KeyboardInterrupt

    environment = in_processes()
    environment.reset()
    monkeypatch.setattr(environment._environment, "step_wait", interrupted)  # the actions have been sent
    with pytest.raises(KeyboardInterrupt):
        environment.apply_action(ZEROS)
    with pytest.raises(RuntimeError, match=r"workers were ended after a failure; build a new one \(KeyboardInterr"):
        environment.reset()
    environment.close()


@pytest.mark.parametrize(("fault", "timeout"), [(exits, None), (exits, 5.0), (hangs, SHORT), (raises, None)])
def test_failure_ends_all_processes_and_close_is_idempotent(fault: Any, timeout: float | None) -> None:
    environment = in_processes(fault, timeout=timeout)
    pids = [process.pid for process in environment._environment.processes]
    with pytest.raises((rein.ReinError, ZeroDivisionError)):
        run(environment)
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids) and not children() & set(pids)
    for again in (environment.reset, lambda: environment.apply_action(ZEROS)):
        with pytest.raises(RuntimeError, match="workers were ended after a failure; build a new one"):
            again()
    environment.close()
    environment.close()


def test_worker_that_dies_between_steps_raises_in_the_next() -> None:
    environment = in_processes()
    environment.reset()
    environment._environment.processes[2].kill()
    with pytest.raises(rein.WorkerDied, match=r"worker 2 of 3 \(pid \d+, killed by SIGKILL"):
        environment.apply_action(ZEROS)


def test_close_with_a_dead_worker_warns(caplog: pytest.LogCaptureFixture) -> None:
    environment = in_processes()
    environment.reset()
    environment._environment.processes[1].kill()
    environment._environment.processes[1].join()
    environment.close()
    assert "a worker died before or while it was closed" in caplog.text


def test_close_kills_a_worker_after_the_timeout(caplog: pytest.LogCaptureFixture) -> None:
    environment = in_processes(hangs, "close", timeout=SHORT)
    environment.reset()
    with caplog.at_level(logging.WARNING):
        environment.close()
    assert "its workers did not close in time, and were killed" in caplog.text


def test_close_returns_after_an_interrupted_call() -> None:
    """This is the state after a second Ctrl-C: Gymnasium still waits for the answers."""
    environment = in_processes(hangs, timeout=SHORT)
    environment.reset()
    for _ in range(2):
        environment.apply_action(ZEROS)
    environment._environment.step_async(ZEROS.numpy())
    environment.close()


def test_failures_in_a_wrapped_foreign_source_raise() -> None:
    for fault, error in ((exits, rein.WorkerDied), (hangs, rein.WorkerTimeout)):
        source = AsyncVectorEnv([functools.partial(Counter, fault)] * N)
        environment = GymnasiumVectorEnvironment(VectorWrapper(source), timeout=SHORT)
        with pytest.raises(error, match=r"worker 1 of 3 \(pid \d+(, exit code 3)?\)"):  # the seed is unknown
            run(environment)
        environment.close()


def test_process_that_ends_during_construction_raises() -> None:
    with pytest.raises(rein.WorkerDied, match="a worker ended while it made its environment"):
        in_processes(exits, "making")
    counter: Any = functools.partial(Counter, exits, "making")
    gc.collect()  # partly built objects are closed, so Python prints no "Exception ignored", which would fail this test
    spec = EnvSpec("Counter-v0", entry_point=counter)
    with pytest.raises(rein.WorkerDied, match="a worker ended while it made its environment"):
        GymnasiumVectorEnvironment(spec, N, vectorization_mode="async")


def test_source_without_processes_accepts_no_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(actions: Any) -> Any:
        raise EOFError("the source's own")

    environment = GymnasiumVectorEnvironment("CartPole-v1", 2, 0)
    environment.reset()
    monkeypatch.setattr(environment._environment, "step", breaks)
    with pytest.raises(EOFError, match="the source's own"):
        environment.apply_action(ZEROS[:2])
    with pytest.raises(ValueError, match=r"timeout=5.0: CartPole-v1 has no processes"):
        GymnasiumVectorEnvironment("CartPole-v1", 2, 0, timeout=5.0)
    for timeout in (0.0, math.nan, math.inf, 1e7):  # the last two overflow in poll(2)
        with pytest.raises(ValueError, match="give seconds above 0 and at most 2e\\+06, or None for no limit"):
            GymnasiumVectorEnvironment("CartPole-v1", 2, 0, timeout=timeout)
    with pytest.raises(ValueError, match="num_envs=0: give 1 or more"):
        GymnasiumVectorEnvironment.in_processes("CartPole-v1", 0)
    wrong: Any = 2.0
    with pytest.raises(TypeError, match=r"num_envs=2.0: give an integer, 1 or more"):
        GymnasiumVectorEnvironment.in_processes("CartPole-v1", wrong)


@pytest.mark.parametrize("source", ["CartPole-v1", functools.partial(gymnasium.make, "Taxi-v4", max_episode_steps=9)])
def test_in_processes_equals_the_adapter_bit_for_bit(source: Any) -> None:
    one = GymnasiumEnvironment(source, 2, 4)
    other = GymnasiumVectorEnvironment.in_processes(source, 2, 4, timeout=20.0)
    actions = torch.randint(0, 2, (40, 2), generator=torch.Generator().manual_seed(0))
    assert first_difference(one.reset(), other.reset()) is None
    for action in actions:
        assert first_difference(one.apply_action(action), other.apply_action(action)) is None
        assert torch.equal(one.episode_seeds, other.episode_seeds)
    other.close()


def test_config_contains_the_given_options() -> None:
    environment = GymnasiumVectorEnvironment.in_processes("Pendulum-v1", 2, 4, g=9.0, info={"success": False})
    assert environment.config["id"] == "Pendulum-v1"
    assert environment.config["make_kwargs"] == {"g": 9.0}
    assert environment.config["info"] == {"success": False}
    environment.close()


def test_workers_ignore_ctrl_c() -> None:
    environment = in_processes()
    environment.reset()
    for process in environment._environment.processes:
        os.kill(process.pid, signal.SIGINT)
    try:
        assert environment.apply_action(ZEROS).valid.all()
    except KeyboardInterrupt:  # would end the test session
        pytest.fail("a worker has handed its KeyboardInterrupt over")
    environment.close()


def test_deleted_environment_leaves_no_process() -> None:
    environment = in_processes(timeout=SHORT)
    pids = {process.pid for process in environment._environment.processes}
    del environment
    assert not children() & pids


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def no_collection() -> Iterator[None]:
    """Context without garbage collection."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def is_closed() -> None:
    environment = in_processes()
    environment.reset()
    environment.close()


def is_dropped() -> None:
    in_processes().reset()


def dies() -> None:
    environment = in_processes(exits)
    with pytest.raises(rein.WorkerDied):
        run(environment)
    environment.close()


def dies_while_it_is_made() -> None:
    with pytest.raises(rein.WorkerDied):
        in_processes(exits, "making")


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts file descriptors by /proc")
@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize("use", [is_closed, is_dropped, dies, dies_while_it_is_made])
def test_pipes_are_closed_without_garbage_collection(use: Callable[[], None]) -> None:
    use()  # the first use opens descriptors that multiprocessing keeps
    before = descriptors()
    for _ in range(3):
        use()
    assert descriptors() == before


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize("asynchronous", [False, True])
def test_failed_start_leaves_no_process_or_pipe(monkeypatch: pytest.MonkeyPatch, asynchronous: bool) -> None:
    def build() -> GymnasiumVectorEnvironment:
        if asynchronous:
            return GymnasiumVectorEnvironment("CartPole-v1", N, vectorization_mode="async")
        return in_processes()

    build().close()
    start, before, started = BaseProcess.start, descriptors(), []

    def fails(process: Any) -> None:
        started.append(process)
        if len(started) == N:
            raise OSError("no more processes")
        start(process)

    monkeypatch.setattr(BaseProcess, "start", fails)
    with pytest.raises(OSError, match="no more processes"):
        build()
    assert len(started) == N
    assert not children() and descriptors() == before


def test_too_few_descriptors_raise_before_processes_start() -> None:
    resource = pytest.importorskip("resource")
    in_processes().close()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    before = descriptors()
    resource.setrlimit(resource.RLIMIT_NOFILE, (before + 30, hard))
    try:
        with pytest.raises(OSError, match="ulimit -n"):
            GymnasiumVectorEnvironment.in_processes(Counter, 20)
        assert not children() and descriptors() == before
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


class Unlearnable(Counter):
    observation_space = spaces.Text(3)  # type: ignore[assignment]  # not a tensor


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize(
    "build",
    [
        lambda: GymnasiumVectorEnvironment.in_processes(Counter, N, timeout=0.0),
        lambda: GymnasiumVectorEnvironment("CartPole-v1", N, vectorization_mode="async", timeout=0.0),
        lambda: GymnasiumVectorEnvironment(
            "CartPole-v1", N, vectorization_mode="async", vector_kwargs={"shared_memory": False}
        ),
        lambda: GymnasiumVectorEnvironment.in_processes(Unlearnable, N),
        lambda: GymnasiumVectorEnvironment(
            EnvSpec("Unlearnable-v0", entry_point=Unlearnable),  # type: ignore[arg-type]
            N,
            vectorization_mode="async",
        ),
    ],
)
def test_processes_end_if_the_adapter_raises(build: Callable[[], Any]) -> None:
    with pytest.raises((ValueError, TypeError)) as caught:  # its traceback keeps the built objects alive
        build()
    assert not children(), caught.value


LIFELINE: list[int] = []  # the ends of a pipe: its children live until all others have closed the second end


def dies_and_leaves_a_child_that_holds_the_pipe() -> None:
    if os.fork() == 0:  # simulators do this
        os.close(LIFELINE[1])
        os.read(LIFELINE[0], 1)
        os._exit(0)
    os._exit(3)


@pytest.fixture
def lifeline() -> Iterator[None]:
    LIFELINE[:] = os.pipe()
    yield
    for end in LIFELINE:
        os.close(end)


@pytest.mark.usefixtures("lifeline")
@pytest.mark.parametrize("where", ["reset", "step"])
def test_dead_worker_is_detected_if_its_child_holds_the_pipe(where: str) -> None:
    environment = in_processes(dies_and_leaves_a_child_that_holds_the_pipe, where)
    with pytest.raises(rein.WorkerDied, match=r"worker 1 of 3 \(pid \d+, exit code 3, episode seed"):
        run(environment)


@pytest.mark.usefixtures("lifeline")
def test_death_during_construction_is_detected_if_a_child_holds_the_pipe() -> None:
    with pytest.raises(rein.WorkerDied, match="a worker ended while it made its environment"):
        in_processes(dies_and_leaves_a_child_that_holds_the_pipe, "making")


@pytest.mark.usefixtures("lifeline")
def test_close_returns_if_a_child_of_a_dead_worker_holds_the_pipe(caplog: pytest.LogCaptureFixture) -> None:
    environment = in_processes(dies_and_leaves_a_child_that_holds_the_pipe, "close")
    environment.reset()
    environment.close()
    assert "exit codes [0, 3, 0]" in caplog.text


PARENT = """
import os, signal, torch
from tests.integrations.test_gymnasium_workers import N, hangs, in_processes

environment = in_processes(hangs, "step", (N - 1,))
environment.reset()
for _ in range(3):
    environment._environment.step_async([0] * N)
    if _ < 2:
        environment._environment.step_wait()
print("killed", flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="Linux ends processes with their parent")
def test_workers_end_with_a_killed_parent() -> None:
    """The workers inherit standard output, so the call returns only when all of them have ended."""
    ended = subprocess.run([sys.executable, "-c", PARENT], cwd=ROOT, capture_output=True, text=True)
    assert ended.stdout == "killed\n" and ended.returncode == -signal.SIGKILL, ended.stderr


def test_unusable_answer_ends_the_workers() -> None:
    """Gymnasium leaves pending answers in the pipes, which would be mistaken for answers to the next call."""

    class NoInfo(Counter):
        def step(self, action: Any) -> Any:
            return *super().step(action)[:4], None

    environment = GymnasiumVectorEnvironment(AsyncVectorEnv([NoInfo] * N), seed=7)
    environment.reset()
    with pytest.raises(AttributeError):
        environment.apply_action(ZEROS)
    with pytest.raises(RuntimeError, match="workers were ended after a failure; build a new one"):
        environment.apply_action(ZEROS)
    assert not children()
    environment.close()


class Drawn(Counter):
    """Environment whose frame contains the number of its renderings."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 12}  # noqa: RUF012  # as Gymnasium has it
    render_mode, drawn = "rgb_array", 0

    def render(self) -> Any:
        self.drawn += 1
        return np.full((2, 2, 3), self.drawn, np.uint8)


@pytest.mark.parametrize(
    "build",
    [
        lambda: GymnasiumVectorEnvironment.in_processes(Drawn, N),
        lambda: GymnasiumVectorEnvironment(AsyncVectorEnv([Drawn] * N)),
        lambda: GymnasiumVectorEnvironment(SyncVectorEnv([Drawn] * N)),
    ],
)
def test_only_the_selected_environment_renders(build: Callable[[], GymnasiumVectorEnvironment]) -> None:
    environment = build()
    environment.reset()
    assert [int(environment.render(1).max()) for _ in range(3)] == [1, 2, 3]
    assert environment._environment.get_attr("drawn") == (0, 3, 0)
    assert environment.render_fps == 12
    environment.apply_action(ZEROS)  # the workers are still usable
    environment.close()


@pytest.mark.parametrize(("fault", "error"), [(exits, rein.WorkerDied), (raises, ZeroDivisionError)])
def test_worker_that_fails_while_rendering_raises(fault: Any, error: Any) -> None:
    class Fails(Drawn):
        def render(self) -> Any:
            fault()

    environment = GymnasiumVectorEnvironment.in_processes(Fails, N, seed=7)
    environment.reset()
    with pytest.raises(error) as caught:
        environment.render(1)
    assert "worker 1 of 3" in str([caught.value, *getattr(caught.value, "__notes__", [])])
    environment.close()


class Differs(Counter):
    """Environment with another space in worker 1."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        if multiprocessing.current_process().name.endswith(">-1"):
            setattr(self, kind, spaces.Box(0.0, 9.0, (1,)))


@pytest.mark.parametrize("kind", ["observation_space", "action_space"])
def test_processes_with_different_spaces_raise_and_end(kind: str) -> None:
    with pytest.raises(ValueError, match=rf"environment 1 has the {kind} .* equal spaces") as caught:
        GymnasiumVectorEnvironment.in_processes(functools.partial(Differs, kind), N)
    assert not children(), caught.value
