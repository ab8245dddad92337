"""Checkpoints whose rows lie in files of their own: killed and failing anywhere, one loads whole, and nothing is left.

And exact resume of off-policy agents through such files.
"""

from __future__ import annotations

import errno
import os
import random
import runpy
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import rein
from rein.errors import CheckpointError
from rein.replay import storage as blocks
from rein.replay.replay import Replay
from rein.store import shards
from rein.store.checkpoint_file import look, read_checkpoint
from rein.store.checkpoint_folder import Checkpoints
from rein.store.format import sealed
from rein.testing.buffer import make_transition
from rein.testing.stateful import first_difference

TOOLS = runpy.run_path(str(Path(__file__).with_name("cases.py")))
RULES = {"last": 2, "every": 5, "best": ("score", "max")}  # so that files of every kind come and go
CALLS = ("open", "write", "fsync", "close", "replace")


@pytest.fixture(autouse=True)
def small(monkeypatch: Any) -> None:
    monkeypatch.setattr(blocks, "BLOCK", 900)
    monkeypatch.setattr(shards, "LEAST", 500)


class Broken:
    """The module `os`, in which `fail(name, arguments)` comes before the `at`th call that changes the disk."""

    def __init__(self, at: int, fail: Callable[[str, tuple[Any, ...]], None]) -> None:
        self.calls, self.at, self.fail = 0, at, fail

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name not in CALLS:
            return real

        def call(*arguments: Any, **options: Any) -> Any:
            self.calls += 1
            if self.calls == self.at:
                self.fail(name, arguments)
            return real(*arguments, **options)

        return call


def die(name: str, arguments: tuple[Any, ...]) -> None:
    if name == "write":  # with half of it on the disk
        os.write(arguments[0], arguments[1][: len(arguments[1]) // 2])
    os.kill(os.getpid(), signal.SIGKILL)


class Part:
    """A replay that holds, after epoch e, the last 160 of 24 e rows."""

    def __init__(self) -> None:
        self.replay, self.steps = Replay(160), 0

    def learn(self, steps: int) -> None:
        while self.steps < steps:
            self.replay.append(make_transition(self.steps, 4))
            self.steps += 1

    def state_dict(self) -> dict[str, Any]:
        return {"replay": self.replay.state_dict(), "steps": self.steps}

    def load_state_dict(self, state: Any) -> None:
        self.replay.load_state_dict(state["replay"])
        self.steps = state["steps"]


def make() -> rein.Loop:
    loop = rein.Loop(lambda state: None, iterations=1)
    part = loop.own("agent", Part())
    loop.epoch_started(lambda state: part.learn(6 * state.epoch))
    loop.epoch_ended(lambda state: state.metrics.update(score=float(state.epoch % 3)))
    return loop


def go_on(folder: Path, acknowledged: int, epochs: int) -> None:
    """From what is there, a checkpoint after each epoch; every second one is waited for and acknowledged."""
    loop, store = make(), Checkpoints(folder)
    if store.newest() is not None:
        rein.resume(loop, folder)
    store.begin(loop)
    for epoch in range(loop.state.epoch + 1, epochs + 1):
        loop.run(epochs=epoch)
        store.take(loop, RULES)
        if epoch % 2 == 0:
            store.flush()
            os.write(acknowledged, epoch.to_bytes(4, "little"))
    store.close()


def check(folder: Path, least: int) -> int:
    """What there is after a death: a checkpoint that loads, all of its rows, and after the next start no others."""
    loop, store = make(), Checkpoints(folder)
    if least == 0 and store.newest() is None:
        store.begin(loop)
        assert not list(folder.rglob("*.h5")) and not list(folder.rglob(".*"))
        return 0
    found = rein.resume(loop, folder)
    epoch = found.about["epochs_ended"]
    assert epoch >= least, "an acknowledged checkpoint is lost"
    whole = Part()
    whole.learn(6 * epoch)
    assert first_difference(whole.state_dict(), loop.parts["agent"].state_dict()) is None
    store.begin(loop)
    kept = [*folder.glob("*.h5"), *(folder / "best").glob("*.h5")]
    named = {name for path in kept for name in (look(path) or {}).get("rows", [])}
    assert {path.stem for path in (folder / "rows").iterdir()} == named != set()
    assert all(read_checkpoint(path) for path in kept) and not list(folder.rglob(".*"))
    return epoch


def killed(folder: Path, moment: float | int) -> tuple[bool, int]:
    """A process that goes on in `folder`, killed after seconds or inside a call: whether it was, and what it said."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            torch.set_num_threads(1)
            os.write(writing, bytes(4))
            if isinstance(moment, int):
                sealed.os = Broken(moment, die)  # type: ignore[assignment]  # a stand-in
            go_on(folder, writing, 60)
        finally:
            os._exit(0)
    os.close(writing)
    os.read(reading, 4)
    if isinstance(moment, float):
        time.sleep(moment)
        os.kill(child, signal.SIGKILL)
    was = os.WIFSIGNALED(os.waitpid(child, 0)[1])
    heard = b""
    while more := os.read(reading, 4096):
        heard += more
    os.close(reading)
    return was, max([0, *(int.from_bytes(heard[k : k + 4], "little") for k in range(0, len(heard), 4))])


def test_a_kill_at_any_moment_leaves_a_checkpoint_with_all_of_its_rows_and_no_others(
    tmp_path: Path, scale: Callable[[int, int], int]
) -> None:
    wanted, kills, inside, run, least, draw = scale(200, 12), 0, 0, 0, 0, random.Random(0)
    while kills < wanted:
        folder = tmp_path / str(run)
        moment = draw.randrange(1, 200) if kills % 3 else 0.3 * draw.random()
        was, said = killed(folder, moment)
        inside += bool(was and list(folder.rglob(".*.tmp-*")))
        kills += was
        least = check(folder, max(least, said))
        if not was or least >= 55:
            run, least = run + 1, 0
    print(f"kill -9 with rows in files of their own: {kills} kills, {inside} inside a write, {kills} of {kills} whole")
    assert inside >= wanted // 10


def test_an_error_at_any_call_is_told_and_leaves_a_checkpoint_with_all_of_its_rows(
    tmp_path: Path, monkeypatch: Any, scale: Callable[[int, int], int]
) -> None:
    def fail(name: str, arguments: tuple[Any, ...]) -> None:
        if name == "close":
            os.close(*arguments)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    null, failed = os.open(os.devnull, os.O_WRONLY), 0
    for at in range(1, 400, scale(1, 23)):
        folder = tmp_path / str(at)
        go_on(folder, null, 3)
        broken = Broken(at, fail)
        with monkeypatch.context() as patch:
            patch.setattr(sealed, "os", broken)
            try:
                go_on(folder, null, 6)
            except CheckpointError as error:
                assert str(folder) in str(error) and "No space left" in str(error)
                failed += 1
            else:
                assert broken.calls < at, f"the error at call {at} was swallowed"
        assert 3 <= check(folder, 3) <= 6
        if broken.calls < at:
            break
    os.close(null)
    print(f"ENOSPC with rows in files of their own: {failed} of {failed} told, a whole checkpoint each time")
    assert failed >= scale(60, 3)


@pytest.mark.parametrize("agent", ["sac", "sac_prioritized", "dqn"])
def test_an_off_policy_agent_resumes_through_such_files_to_the_bit(
    tmp_path: Path, monkeypatch: Any, agent: str
) -> None:
    monkeypatch.setattr(blocks, "BLOCK", 300)
    monkeypatch.setattr(shards, "LEAST", 100)
    case = f"{agent}-{'gymnasium_cartpole' if agent == 'dqn' else 'reach'}-continuing"
    expected = TOOLS["end"](TOOLS["build"](case, tmp_path / "whole"))
    for at in (13, 50):
        folder = tmp_path / str(at)
        loop = TOOLS["build"](case, folder)
        loop.iteration_completed(once=at)(lambda state, loop=loop: loop.interrupt("here"))
        loop.run()
        loop.parts["store"].close()
        resumed = TOOLS["build"](case, folder)
        assert len(rein.resume(resumed, folder).about["rows"]) > 3
        assert first_difference(expected, TOOLS["end"](resumed)) is None, at
