"""Tests of a user's AsyncVectorEnv: errors if a worker raises, dies or hangs."""

from __future__ import annotations

import functools
import gc
import logging
import math
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorWrapper

import rein
from rein.envs.gymnasium import GymnasiumVectorEnvironment
from rein.envs.gymnasium.async_vector_env import _Pipe
from rein.envs.host.processes import GarbageError
from rein.ops.random import episode_seeds
from tests.integrations.faulty import exits, fill, hangs, is_killed, raises, stops_in_an_answer, writes_garbage

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


def is_killed_by_a_signal_without_name() -> None:
    os.kill(os.getpid(), signal.SIGRTMIN + 1)


def raises_a_class_of_its_own() -> None:
    class Boom(Exception):
        pass

    raise Boom("the simulator is out of fuel")


def in_processes(*fault: Any, timeout: float | None = None) -> GymnasiumVectorEnvironment:
    source = AsyncVectorEnv([functools.partial(Counter, *fault)] * N, autoreset_mode=AutoresetMode.DISABLED)
    return GymnasiumVectorEnvironment(source, seed=7, timeout=timeout)


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
    pid = environment._transport._environment.processes[1].pid
    text = rf"AsyncVectorEnv.*worker 1 of 3 \(pid {pid}, {ending}, episode seed {seed_of(1)}\) ended unexpectedly"
    with pytest.raises(rein.WorkerDied, match=text) as caught:
        run(environment)
    assert isinstance(caught.value.__cause__, EOFError | ConnectionError)


@pytest.mark.default_cases("step")
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
    monkeypatch.setattr(environment._transport._environment, "step_wait", interrupted)  # the actions have been sent
    with pytest.raises(KeyboardInterrupt):
        environment.apply_action(ZEROS)
    with pytest.raises(RuntimeError, match=r"workers were ended after a failure; build a new one \(KeyboardInterr"):
        environment.reset()
    environment.close()


@pytest.mark.default_cases("exits-None", "raises-None")
@pytest.mark.parametrize(("fault", "timeout"), [(exits, None), (exits, 5.0), (hangs, SHORT), (raises, None)])
def test_failure_ends_all_processes_and_close_is_idempotent(fault: Any, timeout: float | None) -> None:
    environment = in_processes(fault, timeout=timeout)
    pids = [process.pid for process in environment._transport._environment.processes]
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
    environment._transport._environment.processes[2].kill()
    with pytest.raises(rein.WorkerDied, match=r"worker 2 of 3 \(pid \d+, killed by SIGKILL"):
        environment.apply_action(ZEROS)


def test_close_with_a_dead_worker_warns(caplog: pytest.LogCaptureFixture) -> None:
    environment = in_processes()
    environment.reset()
    environment._transport._environment.processes[1].kill()
    environment._transport._environment.processes[1].join()
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
    environment._transport._environment.step_async(ZEROS.numpy())
    environment.close()


def test_failures_in_a_wrapped_foreign_source_raise() -> None:
    for fault, error in ((exits, rein.WorkerDied), (hangs, rein.WorkerTimeout)):
        source = AsyncVectorEnv([functools.partial(Counter, fault)] * N)
        environment = GymnasiumVectorEnvironment(VectorWrapper(source), timeout=SHORT)
        with pytest.raises(error, match=r"worker 1 of 3 \(pid \d+(, exit code 3)?\)"):  # the seed is unknown
            run(environment)
        environment.close()


def test_process_that_ends_during_construction_raises() -> None:
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
    monkeypatch.setattr(environment._transport._environment, "step", breaks)
    with pytest.raises(EOFError, match="the source's own"):
        environment.apply_action(ZEROS[:2])
    with pytest.raises(ValueError, match=r"timeout=5.0: CartPole-v1 has no processes"):
        GymnasiumVectorEnvironment("CartPole-v1", 2, 0, timeout=5.0)
    for timeout in (0.0, math.nan, math.inf, 1e7):  # the last two overflow in poll(2)
        with pytest.raises(ValueError, match="give seconds above 0 and at most 2e\\+06, or None for no limit"):
            GymnasiumVectorEnvironment("CartPole-v1", 2, 0, timeout=timeout)


def test_deleted_environment_leaves_no_process() -> None:
    environment = in_processes(timeout=SHORT)
    pids = {process.pid for process in environment._transport._environment.processes}
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


@pytest.mark.default_cases("dies")
@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts file descriptors by /proc")
@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize("use", [is_closed, is_dropped, dies])
def test_pipes_are_closed_without_garbage_collection(use: Callable[[], None]) -> None:
    use()  # the first use opens descriptors that multiprocessing keeps
    before = descriptors()
    for _ in range(3):
        use()
    assert descriptors() == before


class Unlearnable(Counter):
    observation_space = spaces.Text(3)  # type: ignore[assignment]  # not a tensor


@pytest.mark.default_cases("<lambda>1")
@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize(
    "build",
    [
        lambda: GymnasiumVectorEnvironment("CartPole-v1", N, vectorization_mode="async", timeout=0.0),
        lambda: GymnasiumVectorEnvironment(
            "CartPole-v1", N, vectorization_mode="async", vector_kwargs={"shared_memory": False}
        ),
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


@pytest.mark.default_cases("step")
@pytest.mark.usefixtures("lifeline")
@pytest.mark.parametrize("where", ["reset", "step"])
def test_dead_worker_is_detected_if_its_child_holds_the_pipe(where: str) -> None:
    environment = in_processes(dies_and_leaves_a_child_that_holds_the_pipe, where)
    with pytest.raises(rein.WorkerDied, match=r"worker 1 of 3 \(pid \d+, exit code 3, episode seed"):
        run(environment)


@pytest.mark.usefixtures("lifeline")
def test_close_returns_if_a_child_of_a_dead_worker_holds_the_pipe(caplog: pytest.LogCaptureFixture) -> None:
    environment = in_processes(dies_and_leaves_a_child_that_holds_the_pipe, "close")
    environment.reset()
    environment.close()
    assert "exit codes [0, 3, 0]" in caplog.text


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
        lambda: GymnasiumVectorEnvironment(AsyncVectorEnv([Drawn] * N)),
        lambda: GymnasiumVectorEnvironment(SyncVectorEnv([Drawn] * N)),
    ],
)
def test_only_the_selected_environment_renders(build: Callable[[], GymnasiumVectorEnvironment]) -> None:
    environment = build()
    environment.reset()
    assert [int(environment.render(1).max()) for _ in range(3)] == [1, 2, 3]
    assert environment._transport._environment.get_attr("drawn") == (0, 3, 0)
    assert environment.render_fps == 12
    environment.apply_action(ZEROS)  # the workers are still usable
    environment.close()


@pytest.mark.parametrize(("fault", "error"), [(exits, rein.WorkerDied), (raises, ZeroDivisionError)])
def test_worker_that_fails_while_rendering_raises(fault: Any, error: Any) -> None:
    class Fails(Drawn):
        def render(self) -> Any:
            fault()

    environment = GymnasiumVectorEnvironment(AsyncVectorEnv([Fails] * N), seed=7)
    environment.reset()
    with pytest.raises(error) as caught:
        environment.render(1)
    assert "worker 1 of 3" in str([caught.value, *getattr(caught.value, "__notes__", [])])
    environment.close()


class Rendered(Counter):
    render_mode = "rgb_array"

    def render(self) -> Any:
        self.meet("render")
        return np.zeros((2, 2, 3), np.uint8)


OPERATIONS: dict[str, Callable[[GymnasiumVectorEnvironment], object]] = {
    "reset": lambda environment: environment.reset(),
    "step": lambda environment: environment.apply_action(ZEROS),
    "render": lambda environment: environment.render(1),
}


def rendered(*fault: Any, timeout: float | None) -> GymnasiumVectorEnvironment:
    source = AsyncVectorEnv([functools.partial(Rendered, *fault)] * N, autoreset_mode=AutoresetMode.DISABLED)
    return GymnasiumVectorEnvironment(source, seed=7, timeout=timeout)


@pytest.mark.default_cases("step-stops_in_an_answer", "reset-writes_garbage")
@pytest.mark.parametrize("fault", [stops_in_an_answer, writes_garbage])
@pytest.mark.parametrize("where", OPERATIONS)
def test_worker_that_breaks_in_an_answer_raises(where: str, fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rein.envs.gymnasium.async_vector_env._MOMENT", 0.1)  # a stopped process ignores SIGTERM
    timeout, error = (0.3, rein.WorkerTimeout) if fault is stops_in_an_answer else (None, rein.WorkerError)
    environment = rendered(fault, where, timeout=timeout)
    with pytest.raises(rein.WorkerError, match=r"worker 1 of 3 \(pid") as caught:
        for method in ("reset", "step", "step", "step", "render"):
            OPERATIONS[method](environment)
    assert type(caught.value) is error
    environment.close()


@pytest.mark.default_cases("step")
@pytest.mark.parametrize("method", [*OPERATIONS, "close"])
def test_worker_that_does_not_read_is_noticed(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rein.envs.gymnasium.async_vector_env._MOMENT", 0.1)
    environment = rendered(timeout=0.3)
    environment.reset()
    process, pipe = (
        environment._transport._environment.processes[1],
        environment._transport._environment.parent_pipes[1],
    )
    fill(process.pid, pipe.fileno())
    if method != "close":
        with pytest.raises(rein.WorkerTimeout, match=r"worker 1 of 3 \(pid \d+, episode seed \d+\): no"):
            OPERATIONS[method](environment)
    environment.close()


def test_sending_ends_if_the_worker_has_sent_garbage() -> None:
    ours, theirs = multiprocessing.Pipe()
    os.write(theirs.fileno(), b"junk" * 100)
    pipe = _Pipe(ours, None)
    pipe.send(bytes(4 << 20))
    with pytest.raises(GarbageError):
        pipe.recv()
    for end in (pipe, theirs):
        end.close()
