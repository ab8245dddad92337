"""Tests of environments in worker processes and threads: results, failures, restarts and closing."""

from __future__ import annotations

import functools
import gc
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

import rein
from rein.envs import GymnasiumEnvironment
from rein.envs.host import pool as module
from rein.ops.random import episode_seeds
from rein.testing.environment_contract import EnvironmentContract, random_actions
from rein.testing.stateful import copy_state, first_difference
from tests.integrations.faulty import (
    Faulty,
    crashes,
    exits,
    hangs,
    is_killed,
    leaves,
    raises,
    raises_a_class_of_its_own,
    wrong_data,
)
from tests.workers import in_workers

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork:DeprecationWarning")

ROOT = Path(__file__).parents[2]
N = 4
SHORT = 1.0  # seconds before a worker counts as hung; enough for the others on a busy machine
MODES = ["processes", "threads"]
ONES = torch.ones(N, dtype=torch.int64)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before = {process.pid for process in multiprocessing.active_children()}
    yield
    gc.collect()
    assert {process.pid for process in multiprocessing.active_children()} <= before


def build(*fault: Any, workers: int = 2, **options: Any) -> GymnasiumEnvironment:
    return in_workers(functools.partial(Faulty, *fault), N, 7, workers=workers, **options)


def run(environment: Any, steps: int = 3) -> None:
    environment.reset()
    for _ in range(steps):
        environment.apply_action(ONES)


def seed_of(index: int, episode: int = 0) -> int:
    return int(episode_seeds(7, torch.tensor(index), torch.tensor(episode)))


class _Contract(EnvironmentContract):
    mode: Any
    steps = 12

    @pytest.fixture(autouse=True)
    def closed(self) -> Iterator[None]:
        self.made: list[Any] = []
        yield
        for environment in self.made:
            environment.close()

    def make(self, num_envs: int, seed: int | None) -> Any:
        workers = min(2, num_envs)
        self.made.append(in_workers(Faulty, num_envs, seed, workers=workers, mode=self.mode))
        return self.made[-1]


@pytest.mark.slow
class TestThreads(_Contract):
    mode = "threads"


class TestProcesses(_Contract):
    mode = "processes"


class Nested(gymnasium.Env[Any, Any]):
    """Environment with nested spaces, infos and masks, whose episodes have random lengths."""

    observation_space = spaces.Dict({"image": spaces.Box(0, 255, (2, 3), np.uint8), "place": spaces.Discrete(9)})
    action_space = spaces.Dict({"move": spaces.Discrete(3), "force": spaces.Box(-1.0, 1.0, (2,))})

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.left = int(self.np_random.integers(1, 6))
        return self.observe(), self.info()

    def observe(self) -> Any:
        return {"image": self.np_random.integers(0, 255, (2, 3), np.uint8), "place": int(self.np_random.integers(9))}

    def info(self) -> Any:
        move = self.np_random.integers(0, 2, 3)
        move[int(self.np_random.integers(3))] = 1
        return {"action_mask": {"move": move}, "left": self.left}

    def step(self, action: Any) -> Any:
        self.left -= 1
        return self.observe(), float(action["force"].sum()) + action["move"], self.left == 0, False, self.info()


@pytest.mark.default_cases("1-threads", "2-threads", "2-processes")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_results_equal_those_of_the_same_process_bit_for_bit(workers: int, mode: Any) -> None:
    options: dict[str, Any] = {"info": {"left": 0}, "action_mask": True}
    one = GymnasiumEnvironment(Nested, N, 3, **options)
    other = in_workers(Nested, N, 3, workers=workers, mode=mode, **options)
    assert first_difference(one.reset(), other.reset()) is None
    for action in random_actions(one, 30):
        assert first_difference(one.apply_action(action), other.apply_action(action)) is None
        assert torch.equal(one.episode_seeds, other.episode_seeds)
    assert first_difference(one.state_dict(), other.state_dict()) is None
    other.close()


@pytest.mark.parametrize("mode", MODES)
def test_state_continues_with_another_number_of_workers(mode: Any) -> None:
    actions = random_actions(one := GymnasiumEnvironment(Nested, N, 3), 20)
    two, three = (in_workers(Nested, N, 3, workers=k, mode=mode, action_mask=False) for k in (2, 3))
    two.reset()
    for action in actions[:7]:
        two.apply_action(action)
    for loaded in (three, one):
        loaded.load_state_dict(copy_state(two.state_dict()))
    for action in actions[7:]:
        expected = two.apply_action(action)
        for loaded in (three, one):
            assert first_difference(expected, loaded.apply_action(action)) is None
    two.close()
    three.close()


@pytest.mark.parametrize("mode", MODES)
def test_state_of_another_episode_is_refused_and_workers_stay_usable(mode: Any) -> None:
    environment = build(mode=mode)
    run(environment, 2)
    state = copy_state(environment.state_dict())
    state["observation"][3] += 1.0
    with pytest.raises(rein.errors.EnvironmentContractError, match="environment 3"):
        environment.load_state_dict(state)
    run(environment)
    environment.close()


@pytest.mark.parametrize("mode", ["sync", *MODES])
def test_environments_that_are_sent_in_any_order_have_the_same_episodes(mode: Any) -> None:
    def episodes(environment: Any, sent: list[list[int]]) -> list[list[Any]]:
        """Return the steps of each environment. Action t of an environment depends on t and its row."""
        found: list[list[Any]] = [[] for _ in range(N)]
        count = [0] * N
        environment.reset()
        for rows in sent:
            environment.send(torch.tensor([(count[row] + row) % 2 for row in rows]), rows)
            got: list[int] = []
            while len(got) < len(rows):
                received, time_step = environment.receive()
                got += received
                for k, row in enumerate(received):
                    found[row].append([x[k].tolist() for x in time_step[:6]])
            assert sorted(got) == sorted(rows)
            for row in rows:
                count[row] += 1
        environment.close()
        return found

    together = [[*range(N)]] * 9
    mixed = [[3], [2, 0], [0, 1, 2, 3], [1, 3], [1], [0, 2]] * 4
    expected = episodes(rein.make(Faulty, N, 7), together)
    found = episodes(rein.make(Faulty, N, 7, workers=2, mode=mode), mixed)
    for one, other in zip(expected, found, strict=True):
        assert other[:9] == one
        assert len(other) > 9


@pytest.mark.parametrize("mode", ["sync", *MODES])
def test_send_and_receive_refuse_wrong_calls(mode: Any) -> None:
    environment = rein.make(Faulty, N, 7, workers=2, mode=mode)
    with pytest.raises(RuntimeError, match="reset"):
        environment.send(ONES[:1], [0])
    environment.reset()
    with pytest.raises(RuntimeError, match="send"):
        environment.receive()
    with pytest.raises(ValueError, match="there are 4 environments"):
        environment.send(ONES[:1], [4])
    with pytest.raises(rein.errors.EnvironmentContractError, match="action"):
        environment.send(ONES, [0])
    environment.send(ONES[:2], [0, 3])
    with pytest.raises(RuntimeError, match="sent twice"):
        environment.send(ONES[:1], [3])
    with pytest.raises(RuntimeError, match="receive"):
        environment.apply_action(ONES)
    environment.send(ONES[:1], [1])
    rows: list[int] = []
    while len(rows) < 3:
        rows += environment.receive()[0]
    assert sorted(rows) == [0, 1, 3]
    environment.apply_action(ONES)
    environment.close()


GATE = threading.Event()


def waits() -> None:
    GATE.wait()


@pytest.mark.parametrize("timeout", [0.0, 0.01])
def test_receive_times_out_without_ending_the_workers(timeout: float) -> None:
    GATE.clear()
    environment = build(waits, "step", mode="threads")
    run(environment, 2)
    environment.send(ONES, [*range(N)])
    assert environment.receive()[0] == [0, 1]
    with pytest.raises(TimeoutError, match="no environment"):
        environment.receive(timeout)
    assert environment.episode_seeds.tolist() == [seed_of(k) for k in range(N)]
    GATE.set()
    assert environment.receive()[0] == [2, 3]
    environment.close()


FAULTS = [
    (exits, rein.errors.WorkerDied, "exit code 3"),
    (is_killed, rein.errors.WorkerDied, "killed by SIGKILL"),
    (crashes, rein.errors.WorkerDied, "killed by SIGSEGV"),
    (hangs, rein.errors.WorkerTimeout, "no answer within 1 s"),
    (leaves, rein.errors.WorkerError, "the simulator leaves"),
    (raises_a_class_of_its_own, rein.errors.WorkerError, "the simulator is out of fuel"),
]
OF_THREADS = {hangs, leaves}


@pytest.mark.default_cases(every=3)
@pytest.mark.parametrize("where", ["reset", "step"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("fault", "error", "text"), FAULTS)
def test_failure_raises_a_typed_error_with_its_place(fault: Any, error: Any, text: str, mode: Any, where: str) -> None:
    if mode == "threads" and fault not in OF_THREADS:
        pytest.skip("threads cannot fail this way")
    environment = build(fault, where, mode=mode, timeout=SHORT)
    with pytest.raises(error, match=r"Faulty.*, worker 1 of 2 \(") as caught:
        run(environment)
    raised: Any = caught.value
    assert text in str(raised)
    assert type(raised) is error
    assert (raised.environment, raised.episode_seed) == (2, seed_of(2))
    assert raised.action == int(where == "step")
    assert (raised.pid is not None) == (mode == "processes")
    for again in (environment.reset, lambda: environment.apply_action(ONES)):
        with pytest.raises(RuntimeError, match="build a new one"):
            again()
    environment.close()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("fault", "error"), [(raises, ZeroDivisionError), (wrong_data, rein.errors.EnvironmentContractError)]
)
def test_exception_of_an_environment_keeps_its_type_and_gets_notes(fault: Any, error: Any, mode: Any) -> None:
    environment = build(fault, mode=mode)
    with pytest.raises(error) as caught:
        run(environment)
    notes = "\n".join(caught.value.__notes__)
    assert "worker 1 of 2" in notes
    assert ("Traceback of the worker" in notes) == (mode == "processes")
    if fault is wrong_data:
        assert "observation, row 2" in str(caught.value)
    else:
        assert f"environment 2, episode seed {seed_of(2)}" in notes


@pytest.mark.parametrize("fault", [exits, raises, raises_a_class_of_its_own])
def test_failure_while_environments_are_made_raises(fault: Any) -> None:
    with pytest.raises((rein.errors.WorkerError, ZeroDivisionError)) as caught:
        build(fault, "making")
    assert "worker 1 of 2" in str([caught.value, *getattr(caught.value, "__notes__", [])])


def test_worker_that_dies_between_steps_raises_in_the_next() -> None:
    environment = build()
    run(environment)
    os.kill(environment._transport._workers[1].pid or 0, signal.SIGKILL)
    with pytest.raises(rein.errors.WorkerDied, match="killed by SIGKILL, environments 2 to 3"):
        environment.apply_action(ONES)


def test_dead_worker_is_detected_if_its_child_holds_the_pipe() -> None:
    ends = os.pipe()

    def dies_and_leaves_a_child() -> None:
        if os.fork() == 0:
            os.close(ends[1])
            os.read(ends[0], 1)
            os._exit(0)
        os._exit(3)

    environment = build(dies_and_leaves_a_child)
    with pytest.raises(rein.errors.WorkerDied, match="exit code 3"):
        run(environment)
    for end in ends:
        os.close(end)


def test_keyboard_interrupt_ends_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    environment = build()
    environment.reset()
    monkeypatch.setattr(environment._transport, "_wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        environment.apply_action(ONES)
    with pytest.raises(RuntimeError, match="KeyboardInterrupt"):
        environment.reset()


def test_workers_ignore_ctrl_c() -> None:
    environment = build()
    environment.reset()
    for worker in environment._transport._workers:
        os.kill(worker.pid or 0, signal.SIGINT)
    assert environment.apply_action(ONES).valid.all()
    environment.close()


@pytest.mark.default_cases("is_killed-processes", "hangs-threads", "raises-processes", "wrong_data-threads")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("fault", [exits, is_killed, hangs, raises, raises_a_class_of_its_own, wrong_data])
def test_restart_ends_the_episodes_of_the_worker_and_no_others(
    fault: Any, mode: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if mode == "threads" and fault in (exits, is_killed):
        pytest.skip("threads cannot die")
    environment = build(fault, "step", 1, tmp_path / "once", mode=mode, timeout=SHORT, on_failure="restart")
    reference = GymnasiumEnvironment(Faulty, N, 7)
    assert first_difference(reference.reset(), environment.reset()) is None
    for _ in range(2):
        last = reference.apply_action(ONES).observation
        environment.apply_action(ONES)
    expected, got = reference.apply_action(ONES), environment.apply_action(ONES)
    assert environment.restarts == 1
    assert "restart 1 of 10" in caplog.text
    assert first_difference(*(copy_rows(x, slice(0, 2)) for x in (expected, got))) is None
    assert got.valid.tolist() == [True, True, False, False]
    assert got.truncated.tolist() == [False, False, True, True]
    assert not got.terminated.any() and not got.reward[2:].any()
    assert torch.equal(got.final_observation[2:], last[2:])
    assert environment.episode_seeds.tolist() == [seed_of(0), seed_of(1), seed_of(2, 1), seed_of(3, 1)]
    fresh = GymnasiumEnvironment(Faulty, N, 0)
    assert torch.equal(fresh.reset_to(environment.episode_seeds)[2:], got.observation[2:])
    resumed = GymnasiumEnvironment(Faulty, N, 0)
    resumed.load_state_dict(copy_state(environment.state_dict()))
    for _ in range(9):
        assert first_difference(resumed.apply_action(ONES), environment.apply_action(ONES)) is None
    environment.close()


def copy_rows(time_step: Any, rows: slice) -> list[Any]:
    return [x[rows] for x in time_step[:6]]


@pytest.mark.parametrize("where", ["reset", "render"])
def test_restart_repeats_the_call_that_failed(where: str, tmp_path: Path) -> None:
    environment = build(exits, where, 1, tmp_path / "once", on_failure="restart")
    first = environment.reset()
    assert int(environment.render(3).max()) == 1
    assert environment.restarts == 1
    assert torch.equal(first, GymnasiumEnvironment(Faulty, N, 7).reset())
    environment.close()


def test_environment_that_was_not_sent_reports_its_lost_episode_in_its_next_step(tmp_path: Path) -> None:
    environment = build(exits, "step", 1, tmp_path / "once", on_failure="restart")
    run(environment, 2)
    last = environment.apply_action_where(ONES, torch.tensor([True, True, False, True])).observation
    assert environment.restarts == 1
    assert environment.state_dict()["steps"].tolist() == [3, 3, -1, 0]
    assert environment.episode_seeds.tolist() == [seed_of(0), seed_of(1), seed_of(2), seed_of(3, 1)]
    time_step = environment.apply_action(ONES)
    assert time_step.valid.tolist() == [True, True, False, True]
    assert time_step.truncated.tolist() == [False, False, True, False]
    assert torch.equal(time_step.final_observation[2], last[2])
    assert environment.episode_seeds.tolist() == [seed_of(0, 1), seed_of(1, 1), seed_of(2, 1), seed_of(3, 1)]
    environment.close()


def test_failure_after_the_last_restart_raises() -> None:
    environment = build(raises, on_failure="restart", max_restarts=2)
    environment.reset()
    with pytest.raises(ZeroDivisionError):
        for _ in range(20):
            environment.apply_action(ONES)
    assert environment.restarts == 2
    environment.close()


def test_new_worker_that_fails_in_its_start_is_replaced(tmp_path: Path) -> None:
    """The second worker finds one file, and the third both."""

    class Twice(Faulty):
        def __init__(self) -> None:
            super().__init__(exits, "step", 1, tmp_path / "first")
            if self.fault is not None and (tmp_path / "first").exists() and not (tmp_path / "second").exists():
                (tmp_path / "second").touch()
                exits()

    environment = in_workers(Twice, N, 7, workers=2, on_failure="restart")
    run(environment)
    assert environment.restarts == 2
    environment.close()


def test_messages_that_are_larger_than_a_pipe_arrive() -> None:
    class Draws(Faulty):
        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            super().reset(seed=seed)
            self.drawn = 0.0 if options is None else options["level"]
            return self.observe(), {}

        def render(self) -> Any:
            return np.full((1000, 1000, 3), self.drawn, np.uint8)

    environment = in_workers(Draws, N, 7, workers=2)
    environment.reset()
    environment.set_options({"level": 7, "text": "a" * 1_000_000})
    assert (environment.reset()[:, 1] == 7.0).all()
    assert (environment.render(3) == 7).all()
    environment.set_options({"level": 9, "text": "b" * 1_000_000}, [3])
    for _ in range(4):
        time_step = environment.apply_action(ONES)
    assert time_step.observation[:, 1].tolist() == [7.0, 7.0, 7.0, 9.0]
    environment.close()


@pytest.mark.parametrize("mode", MODES)
def test_only_the_selected_environment_renders(mode: Any) -> None:
    environment = build(mode=mode)
    environment.reset()
    assert [int(environment.render(index).max()) for index in (3, 3, 0, -1)] == [1, 2, 1, 3]
    assert environment.render_fps == 12
    environment.close()


def test_render_without_a_render_mode_raises() -> None:
    environment = in_workers("CartPole-v1", 2, workers=2, mode="threads")
    environment.reset()
    with pytest.raises(ValueError, match="render_mode='rgb_array'"):
        environment.render()
    environment.close()


def test_different_spaces_in_workers_raise() -> None:
    class Differs(Faulty):
        def __init__(self) -> None:
            super().__init__(lambda: setattr(self, "action_space", spaces.Discrete(3)), "making")

    with pytest.raises(ValueError, match="equal spaces"):
        in_workers(Differs, N, workers=2)


def test_threads_with_the_same_environment_raise() -> None:
    one = Faulty()
    with pytest.raises(ValueError, match="same environment twice"):
        in_workers(lambda: one, N, workers=N, mode="threads")


def test_frame_that_cannot_be_pickled_raises() -> None:
    class Draws(Faulty):
        def render(self) -> Any:
            return lambda: 1

    environment = in_workers(Draws, N, 7, workers=2)
    environment.reset()
    with pytest.raises(rein.errors.WorkerError, match="pickle"):
        environment.render()
    assert environment.apply_action(ONES).valid.all()
    environment.close()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_factories_of_local_objects_work_with_every_start_method(method: str) -> None:
    text = f"""
import multiprocessing
import torch
from rein.envs import GymnasiumEnvironment

def main():
    import gymnasium
    steps = 5
    environment = GymnasiumEnvironment(lambda: gymnasium.make("CartPole-v1", max_episode_steps=steps), 2, 0, workers=2)
    environment.reset()
    ended = [environment.apply_action(torch.ones(2, dtype=torch.int64)).truncated.all() for _ in range(5)]
    environment.close()
    print(bool(ended[-1]))

if __name__ == "__main__":
    multiprocessing.set_start_method("{method}")
    main()
"""
    done = subprocess.run([sys.executable, "-c", text], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "True\n", done.stderr


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"workers": 5}, "workers=5"),
        ({"workers": 0}, "workers=0"),
        ({"mode": "fibers"}, "mode='fibers'"),
        ({"timeout": 0.0}, "timeout=0"),
        ({"on_failure": "ignore"}, "on_failure='ignore'"),
    ],
)
def test_invalid_options_raise_before_workers_start(options: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        in_workers(Faulty, N, **options)


def test_make_with_a_mode_without_workers_raises() -> None:
    with pytest.raises(ValueError, match="workers="):
        rein.make(Faulty, N, mode="threads")


def test_config_contains_the_given_options() -> None:
    environment = in_workers("Pendulum-v1", 2, 4, workers=1, mode="threads", info={"x": 0}, g=9.0)
    config = environment.config
    assert (config["workers"]["workers"], config["workers"]["mode"]) == (1, "threads")
    assert (config["id"], config["make_kwargs"], config["info"]) == ("Pendulum-v1", {"g": 9.0}, {"x": 0})
    assert repr(environment).startswith("GymnasiumEnvironment('Pendulum-v1', num_envs=2, workers=1, mode='threads'")
    environment.close()


@pytest.mark.parametrize("mode", MODES)
def test_close_in_every_state_returns_and_is_idempotent(mode: Any) -> None:
    def sent(environment: GymnasiumEnvironment) -> None:
        environment.reset()
        environment.send(ONES, [*range(N)])

    for prepare in (lambda _: None, lambda environment: environment.reset(), run, sent):
        environment = build(mode=mode)
        prepare(environment)
        environment.close()
        environment.close()
        with pytest.raises(RuntimeError, match="close"):
            environment.reset()


def test_close_kills_a_worker_that_hangs(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_GRACE", 0.2)
    environment = build(hangs, "close")
    environment.reset()
    with caplog.at_level(logging.WARNING):
        environment.close()
    assert "worker 1 did not end in time, and was killed" in caplog.text


def test_close_with_a_dead_worker_warns(caplog: pytest.LogCaptureFixture) -> None:
    environment = build()
    environment.reset()
    os.kill(environment._transport._workers[1].pid or 0, signal.SIGKILL)
    environment.close()
    assert "killed by SIGKILL" in caplog.text


@pytest.mark.parametrize("mode", MODES)
def test_deleted_environment_ends_its_workers(mode: Any) -> None:
    environment = build(mode=mode)
    environment.reset()
    workers = [*environment._transport._workers]
    del environment
    assert all(worker.join(0.0) for worker in workers)


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts file descriptors by /proc")
@pytest.mark.parametrize("fault", [None, exits, raises])
def test_descriptors_are_closed_without_garbage_collection(fault: Callable[[], None] | None) -> None:
    def use() -> int:
        environment = build(fault)
        try:
            run(environment)
        except (rein.errors.WorkerDied, ZeroDivisionError) as error:
            error.__traceback__ = None
        environment.close()
        return len(os.listdir("/proc/self/fd"))

    use()  # the first use opens descriptors that multiprocessing keeps
    gc.collect()
    gc.disable()
    try:
        assert use() == use() == use()
    finally:
        gc.enable()
