"""Checkpoints with row files: after a kill or an error anywhere, one loads completely and no unused files remain.

Also tests exact resume of off-policy agents from such checkpoints.
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
from rein.store import checkpoint_file as shards
from rein.store.checkpoint_file import look, read_checkpoint
from rein.store.checkpoint_folder import Checkpoints
from rein.store.format import sealed
from rein.testing.buffer_contract import make_transition
from rein.testing.stateful import first_difference
from tests.faults.broken_os import BrokenOs, dies, raises

TOOLS = runpy.run_path(str(Path(__file__).with_name("cases.py")))
RULES = {"last": 2, "every": 5, "best": ("score", "max")}  # files of every kind are written and removed


@pytest.fixture(autouse=True)
def small(monkeypatch: Any) -> None:
    monkeypatch.setattr(blocks, "BLOCK", 900)
    monkeypatch.setattr(shards, "LEAST", 500)


class Part:
    """Agent with a replay buffer that holds the last 160 of 24 e rows after epoch e."""

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


def continue_run(folder: Path, acknowledged: int, epochs: int) -> None:
    """Continue the run with a checkpoint after each epoch. Flush and acknowledge every second one."""
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
    """Check that a checkpoint loads with all of its rows, and that the next start removes all other rows."""
    loop, store = make(), Checkpoints(folder)
    if least == 0 and store.newest() is None:
        store.begin(loop)
        assert not list(folder.rglob("*.h5")) and not list(folder.rglob(".*"))
        return 0
    found = rein.resume(loop, folder)
    epoch = found.about["epochs_ended"]
    assert epoch >= least, "an acknowledged checkpoint was lost"
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
    """Continue the run in a process, and kill it after seconds (float) or inside a call (int).

    Returns whether it was killed and the last acknowledged epoch.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            torch.set_num_threads(1)
            os.write(writing, bytes(4))
            if isinstance(moment, int):
                sealed.os = BrokenOs(moment, dies)  # type: ignore[assignment]  # a fake module
            continue_run(folder, writing, 60)
        finally:
            os._exit(0)
    os.close(writing)
    os.read(reading, 4)
    if isinstance(moment, float):
        time.sleep(moment)
        os.kill(child, signal.SIGKILL)
    was_killed = os.WIFSIGNALED(os.waitpid(child, 0)[1])
    received = b""
    while more := os.read(reading, 4096):
        received += more
    os.close(reading)
    return was_killed, max([0, *(int.from_bytes(received[k : k + 4], "little") for k in range(0, len(received), 4))])


def test_kill_leaves_a_checkpoint_with_exactly_its_rows(tmp_path: Path, scale: Callable[[int, int], int]) -> None:
    wanted, kills, inside, run, least, draw = scale(100, 9), 0, 0, 0, 0, random.Random(0)
    while kills < wanted:
        folder = tmp_path / str(run)
        moment = draw.randrange(1, 200) if kills % 3 else 0.3 * draw.random()
        was_killed, acknowledged = killed(folder, moment)
        inside += bool(was_killed and list(folder.rglob(".*.tmp-*")))
        kills += was_killed
        least = check(folder, max(least, acknowledged))
        if not was_killed or least >= 55:
            run, least = run + 1, 0
    print(f"kill -9 with row files: {kills} kills, {inside} inside a write, {kills} of {kills} complete")
    assert inside >= wanted // 10


def test_failing_call_raises_and_leaves_a_complete_checkpoint(
    tmp_path: Path, monkeypatch: Any, scale: Callable[[int, int], int]
) -> None:
    null, failed = os.open(os.devnull, os.O_WRONLY), 0
    for at in range(1, 400, scale(1, 23)):
        folder = tmp_path / str(at)
        continue_run(folder, null, 3)
        broken = BrokenOs(at, raises(errno.ENOSPC))
        with monkeypatch.context() as patch:
            patch.setattr(sealed, "os", broken)
            try:
                continue_run(folder, null, 6)
            except CheckpointError as error:
                assert str(folder) in str(error) and "No space left" in str(error)
                failed += 1
            else:
                assert broken.calls < at, f"the error at call {at} was swallowed"
        assert 3 <= check(folder, 3) <= 6
        if broken.calls < at:
            break
    os.close(null)
    print(f"ENOSPC with row files: {failed} of {failed} raised, a complete checkpoint each time")
    assert failed >= scale(60, 3)


@pytest.mark.default_cases("dqn")
@pytest.mark.parametrize("agent", ["sac", "sac_prioritized", "dqn"])
def test_off_policy_agent_resumes_bit_for_bit_from_row_files(tmp_path: Path, monkeypatch: Any, agent: str) -> None:
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
