"""Signals end or save a run. Signal handlers are installed only while it runs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import rein
from rein.envs.cartpole import CartPole
from rein.handlers.checkpoint import checkpoint
from rein.handlers.interrupts import interrupts
from rein.testing.stateful import first_difference
from tests import programs

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGXCPU, signal.SIGUSR1, signal.SIGUSR2)


@pytest.fixture(autouse=True)
def _handlers_of_a_terminal() -> Iterator[None]:
    """Handle signals as in a program of a terminal. A program in the background ignores some of them."""
    before = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in before.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def make(folder: Path | None = None) -> tuple[rein.Loop, Any]:
    loop = rein.Loop(lambda state: (state.step_state or 0) + 1, epochs=6, iterations=10)
    saver = checkpoint(loop, rein.Checkpoints(folder), every=0, keep_last=None) if folder is not None else None
    return loop, interrupts(loop, saver)


def send(number: int) -> None:
    os.kill(os.getpid(), number)


def handlers() -> list[Any]:
    return [signal.getsignal(number) for number in SIGNALS]


@pytest.mark.parametrize(
    ("number", "event"),
    [
        (signal.SIGINT, "epoch_started"),
        (signal.SIGTERM, "iteration_started"),
        (signal.SIGHUP, "iteration_completed"),
        (signal.SIGXCPU, "epoch_ended"),
    ],
)
def test_signal_ends_the_run_at_the_edge_and_saves_it(tmp_path, capfd, number, event):
    before = handlers()
    loop, caught = make(tmp_path)
    getattr(loop, event)(once=3)(lambda state: send(number))
    final = loop.run()
    name = signal.Signals(number).name
    assert (final.status, final.reason, caught.signal) == ("halted", f"interrupted by {name}", number)
    assert f"rein: {name}: the run ends after this iteration" in capfd.readouterr().err
    assert handlers() == before
    resumed, caught = make(tmp_path)
    rein.resume(resumed, tmp_path)
    assert resumed.state.total_iterations == final.total_iterations
    assert (resumed.run().step_state, caught.signal) == (60, None)


def test_interrupted_epoch_stays_open(tmp_path):
    loop, _ = make(tmp_path)
    ends = []
    loop.epoch_ended(lambda state: ends.append(state.epoch))
    loop.iteration_completed(once=17)(lambda state: send(signal.SIGINT))
    loop.run()
    assert ends == [1]
    assert [path.stem for path in tmp_path.glob("*.h5")] == ["epoch-000002-iteration-000007"]


@pytest.mark.parametrize(("number", "raised"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_second_signal_ends_the_run_immediately(tmp_path, number, raised):
    before = handlers()
    loop, _ = make(tmp_path)

    @loop.iteration_started(once=13)
    def hang(state: rein.State) -> None:
        send(number)
        send(number)
        threading.Event().wait()

    with pytest.raises(raised) as error:
        loop.run()
    assert number == signal.SIGINT or error.value.code == 143
    assert handlers() == before
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_during_cleanup_is_ignored(tmp_path, number):
    before, closed = handlers(), []
    loop, caught = make(tmp_path)

    def close() -> None:
        send(number)
        closed.append(True)

    loop.started(lambda state: loop.cleanups.append(close))
    assert loop.run().status == "completed"
    assert (closed, caught.signal, handlers() == before) == ([True], None, True)


def test_second_signal_ends_the_cleanup(tmp_path):
    before = handlers()
    loop, _ = make(tmp_path)

    def close() -> None:
        send(signal.SIGINT)
        send(signal.SIGINT)

    loop.started(lambda state: loop.cleanups.append(close))
    with pytest.raises(KeyboardInterrupt):
        loop.run()
    assert handlers() == before


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGXCPU])
def test_repeated_system_signal_does_not_force_the_end(tmp_path, number):
    loop, caught = make(tmp_path)

    @loop.iteration_started(once=13)
    def repeat(state: rein.State) -> None:
        send(number)
        send(number)

    assert (loop.run().status, caught.signal) == ("halted", number)
    assert [path.stem for path in tmp_path.glob("*.h5")] == ["epoch-000002-iteration-000003"]


def test_ignored_sighup_stays_ignored(tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        loop, caught = make(tmp_path)
        loop.iteration_started(once=13)(lambda state: send(signal.SIGHUP))
        assert (loop.run().status, caught.signal) == ("completed", None)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_sigusr_saves_and_continues(tmp_path, number):
    loop, caught = make(tmp_path)
    loop.iteration_started(once=13)(lambda state: send(number))
    final = loop.run()
    assert (final.status, final.step_state, caught.signal) == ("completed", 60, None)
    assert sorted(path.stem for path in tmp_path.glob("*.h5")) == ["epoch-000002-iteration-000003", "epoch-000006"]


def test_signal_handlers_are_restored_after_errors(tmp_path):
    before = handlers()

    def broken(state: rein.State) -> None:
        raise RuntimeError("out of order")

    for event in ("iteration_completed", "completed"):
        loop, _ = make(tmp_path)
        seen: list[Any] = []
        loop.epoch_started(lambda state, seen=seen: seen.append(handlers()))
        loop.event(event).attach(lambda state: state.request(broken))
        with pytest.raises(RuntimeError, match="out of order"):
            loop.run()
        assert all(now != then for now, then in zip(seen[0], before, strict=True))
        assert handlers() == before


def test_sigusr1_without_a_saver_is_not_handled():
    before = signal.getsignal(signal.SIGUSR1)
    loop, _ = make()
    seen = []
    loop.epoch_started(lambda state: seen.append(signal.getsignal(signal.SIGUSR1)))
    loop.run(epochs=1)
    assert seen == [before]


def test_other_threads_do_not_install_handlers(tmp_path):
    before, seen = handlers(), []
    loop, _ = make(tmp_path)
    loop.epoch_started(lambda state: seen.append(handlers()))
    thread = threading.Thread(target=loop.run)
    thread.start()
    thread.join()
    assert seen == [before] * 6
    assert loop.state.status == "completed"


def test_importing_rein_changes_no_signal_handler():
    code = """
import signal, sys
numbers = [n for n in signal.Signals if n not in (signal.SIGKILL, signal.SIGSTOP)]
before = [signal.getsignal(n) for n in numbers]
import rein, rein.cli, rein.cli.train, rein.handlers.interrupts
sys.exit([signal.getsignal(n) for n in numbers] != before)
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_force_after_ends_an_unresponsive_process(tmp_path):
    """Python raises no exception while a C function runs, so a timer ends the process."""
    code = """
import os, signal, threading, time, rein
from rein.handlers.interrupts import interrupts

def stuck(state):
    os.kill(os.getpid(), signal.SIGINT)
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except KeyboardInterrupt:
        time.sleep(1e6)

loop = rein.Loop(stuck, iterations=1)
interrupts(loop, force_after=0.2)
loop.run()
"""
    assert programs.run("-c", code, check=False).returncode == 130


def script(folder: Path) -> rein.Loop:
    environment = CartPole(4, seed=0)
    agent = rein.PPO(environment, hidden=(4,), rollout_steps=4, seed=0)
    loop = rein.training_loop(agent, environment, rein.HDF5Store(folder, exist="resume"), epochs=4, iterations=8)
    rein.checkpoint(loop, every=2)
    return loop


def test_first_ctrl_c_in_a_script_saves_the_run_and_raises(tmp_path, capfd):
    loop = script(tmp_path / "run")
    loop.iteration_completed(once=13)(lambda state: send(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt) as raised:
        loop.run()
    assert len(raised.traceback) <= 3
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    shown = capfd.readouterr().err
    assert "the run ends after this iteration and is saved" in shown
    assert f"rein.resume(loop, '{tmp_path / 'run'}')" in shown.splitlines()[-1]
    loop.parts["store"].close()
    (listed,) = rein.list_runs(tmp_path)
    assert listed.status == "interrupted"
    resumed, whole = script(tmp_path / "run"), script(tmp_path / "whole")
    rein.resume(resumed)
    assert resumed.state.total_iterations == 13
    ends = [loop.run().step_state and loop.parts["agent"].state_dict() for loop in (resumed, whole)]
    assert first_difference(*ends) is None


def test_first_ctrl_c_in_train_raises_with_a_short_traceback(tmp_path):
    environment = CartPole(4, seed=0)
    agent = rein.PPO(environment, hidden=(4,), rollout_steps=4, seed=0)
    fields = lambda state: send(signal.SIGINT) or {"twice": state.step_state.transition.reward * 2}  # noqa: E731
    with pytest.raises(KeyboardInterrupt) as raised:
        rein.train(agent, environment, tmp_path / "run", epochs=2, state_to_trajectory=fields, progress=False)
    assert len(raised.traceback) <= 3


def test_second_ctrl_c_in_a_script_raises_at_once(tmp_path):
    loop = script(tmp_path / "run")

    @loop.iteration_started(once=13)
    def hang(state: rein.State) -> None:
        send(signal.SIGINT)
        send(signal.SIGINT)
        threading.Event().wait()

    with pytest.raises(KeyboardInterrupt):
        loop.run()
    assert loop.state.status == "failed"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_script_with_a_store_in_memory_states_that_the_run_is_not_saved(capfd):
    env = CartPole(2, seed=0)
    loop = rein.training_loop(rein.PPO(env, seed=0), env, rein.MemoryStore(), epochs=1, iterations=8)
    loop.iteration_completed(once=3)(lambda state: send(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        loop.run()
    assert "rein.checkpoint(loop, rein.Checkpoints(folder)) would save it" in capfd.readouterr().err


def test_script_with_a_signal_handler_keeps_it(tmp_path):
    received = []
    before = signal.signal(signal.SIGINT, lambda number, frame: received.append(number))
    try:
        loop = script(tmp_path / "run")
        loop.iteration_completed(once=3)(lambda state: send(signal.SIGINT))
        assert loop.run().status == "completed"
    finally:
        signal.signal(signal.SIGINT, before)
    assert received == [signal.SIGINT]


def test_attached_interrupts_replace_those_of_the_script(tmp_path):
    loop = script(tmp_path / "run")
    caught = interrupts(loop)
    loop.iteration_completed(once=3)(lambda state: send(signal.SIGINT))
    assert loop.run().status == "halted"
    assert caught.signal == signal.SIGINT
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


SCRIPT = """
import os, signal, rein
from rein.envs.cartpole import CartPole
for seed in range(2):
    environment = CartPole(4, seed=seed)
    agent = rein.PPO(environment, hidden=(4,), rollout_steps=4, seed=seed)
    loop = rein.training_loop(agent, environment, f"run-{seed}", epochs=4, iterations=8)
    loop.iteration_completed(once=3)(lambda state: os.kill(os.getpid(), signal.SIGINT))
    loop.run()
"""


def test_ctrl_c_ends_a_script_that_loops_over_seeds(tmp_path):
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == -signal.SIGINT
    assert [path.name for path in tmp_path.iterdir()] == ["run-0"]
    assert done.stderr.count('  File "') <= 3
