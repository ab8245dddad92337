"""`run.log` in the folder of a run."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

import rein
from tests import programs


def make(path: Path, exist: str = "error") -> rein.Loop:
    env = rein.envs.Gridworld(2, seed=0)
    store = rein.HDF5Store(path, exist=exist)  # type: ignore[arg-type]  # a literal in each test
    return rein.training_loop(rein.QLearning(env, seed=0), env, store, iterations=4, epochs=2)


def test_run_log_has_warnings_and_the_start_and_end_of_each_run(tmp_path: Path) -> None:
    loop = make(tmp_path / "run")
    loop.epoch_ended(lambda state: logging.getLogger("rein").warning("epoch %d is odd", state.epoch))
    loop.run()
    loop.run(epochs=3)
    logging.getLogger("rein").warning("after the run")
    lines = (tmp_path / "run/run.log").read_text().splitlines()
    messages = [line.split(" ", 3)[3] for line in lines]
    assert [message.split()[0] for message in messages] == ["started", "epoch", "epoch", "completed"] * 1 + [
        "started",
        "epoch",
        "completed",
    ]


def test_warnings_of_a_run_with_a_run_log_appear_on_the_console(tmp_path: Path) -> None:
    code = """
import logging, rein
env = rein.envs.Gridworld(2, seed=0)
loop = rein.training_loop(rein.QLearning(env, seed=0), env, "run", iterations=4, epochs=1)
loop.epoch_ended(lambda state: logging.getLogger("rein").warning("look here"))
loop.run()
logging.getLogger("rein").warning("after the run")
"""
    assert programs.run("-c", code, cwd=tmp_path).stderr == "look here\nafter the run\n"


def test_run_log_has_the_traceback_of_a_failure(tmp_path: Path) -> None:
    loop = make(tmp_path / "run")

    @loop.iteration_completed(once=3)
    def fail(state: rein.State) -> None:
        raise RuntimeError("out of order")

    with pytest.raises(RuntimeError):
        loop.run()
    text = (tmp_path / "run/run.log").read_text()
    assert "failed after" in text and "Traceback" in text and "RuntimeError: out of order" in text
    assert "in handler" in text, "the notes of the error"


def test_run_log_that_cannot_be_written_does_not_end_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    loop = make(tmp_path / "run")
    (tmp_path / "elsewhere").write_text("untouched")
    (tmp_path / "run/run.log").symlink_to(tmp_path / "elsewhere")
    assert loop.run().status == "completed"
    assert caplog.text.count("cannot be written") == 1
    assert (tmp_path / "elsewhere").read_text() == "untouched"


def test_resumed_run_continues_the_run_log(tmp_path: Path) -> None:
    loop = make(tmp_path / "run")
    rein.checkpoint(loop)
    loop.run(epochs=1)
    loop.parts["store"].close()
    again = make(tmp_path / "run", "resume")
    rein.resume(again)
    again.run()
    assert "resumed in epoch 1" in (tmp_path / "run/run.log").read_text()


def test_run_log_has_errors_of_loggers_that_are_closed(tmp_path: Path) -> None:
    class Fails:
        def write(self, clocks: object, metrics: object) -> None: ...

        def close(self) -> None:
            raise RuntimeError("the connection is lost")

    loop = make(tmp_path / "run")
    rein.handlers.loggers.attach(loop, Fails())
    assert loop.run().status == "completed"
    assert "the connection is lost" in (tmp_path / "run/run.log").read_text()


def test_run_log_of_a_copy_with_hard_links_is_independent(tmp_path: Path) -> None:
    loop = make(tmp_path / "run")
    loop.run(epochs=1)
    (tmp_path / "copy.log").hardlink_to(tmp_path / "run/run.log")
    before = (tmp_path / "copy.log").read_bytes()
    loop.run(epochs=2)
    assert (tmp_path / "copy.log").read_bytes() == before
    assert (tmp_path / "run/run.log").read_bytes().startswith(before)
