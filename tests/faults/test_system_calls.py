"""Fail every system call of a save in turn: the previous or the new checkpoint loads, and the error has the reason."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import rein
from rein.errors import CheckpointError
from rein.store import checkpoint_folder
from rein.store.checkpoint_folder import Checkpoints
from rein.store.format import sealed
from tests.faults.broken_os import BrokenOs, dies, raises

RULES = {"last": 1, "best": ("score", "max")}  # a save writes and removes files of every kind


def shortened(name: str, real: Any, arguments: tuple[Any, ...]) -> Any:
    """Write only a part of the bytes. Other calls are unchanged."""
    return real(arguments[0], arguments[1][:7]) if name == "write" else real(*arguments)


def make(score: float) -> rein.Loop:
    weight = torch.full((200,), score)

    class Part:
        def state_dict(self) -> dict[str, Any]:
            return {"weight": weight}

        def load_state_dict(self, state: Any) -> None:
            weight.copy_(state["weight"])

    loop = rein.Loop(lambda state: None, iterations=1)
    loop.own("agent", Part())
    loop.epoch_ended(lambda state: state.metrics.update(score=score))
    return loop


def saved(folder: Path, number: int) -> Checkpoints:
    """Return a folder with the checkpoint of epoch `number`, ready for the next one."""
    store = Checkpoints(folder / "checkpoints")
    loop = make(float(number))
    loop.run(epochs=number)
    store.begin(loop)
    store.take(loop, RULES)
    store.close()
    return store


def take_next(store: Checkpoints) -> None:
    loop = make(9.0)
    loop.run(epochs=2)
    store.take(loop, RULES)
    store.close()


def check(folder: Path, at: int) -> str:
    """Check that the newest checkpoint is the previous or the new one, and that temporary files are removed."""
    store = Checkpoints(folder / "checkpoints")
    newest = store.newest()
    assert newest is not None and newest.path.stem in ("epoch-000001", "epoch-000002"), at
    resumed = make(0.0)
    rein.resume(resumed, folder)
    weight = resumed.parts["agent"].state_dict()["weight"]
    assert weight.tolist() == [1.0 if newest.path.stem == "epoch-000001" else 9.0] * 200
    store.begin(resumed)
    assert not list(folder.rglob(".*")), f"call {at} left a temporary file"
    best = [path for path in (folder / "checkpoints/best").glob("*.h5")]
    assert len(best) >= 1
    assert all(rein.store.checkpoint_file.read_checkpoint(path) for path in best)
    return newest.path.stem


@pytest.mark.default_cases("5", "28")
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EACCES, errno.EROFS, errno.EDQUOT])
def test_failing_call_leaves_the_previous_or_new_checkpoint(tmp_path, monkeypatch, code):
    loaded = set()
    for at in range(1, 1000):
        folder = tmp_path / str(at)
        store = saved(folder, 1)
        faulty = BrokenOs(at, raises(code))
        with monkeypatch.context() as patch:
            patch.setattr(sealed, "os", faulty)
            try:
                take_next(store)
            except CheckpointError as error:
                assert str(folder) in str(error), at
                assert os.strerror(code) in str(error), at
            else:
                assert faulty.calls < at, f"the error at call {at} was swallowed"
                break
        loaded.add(check(folder, at))
    assert at > 25  # a checkpoint, the best and the latest: at least eight calls each
    assert loaded == {"epoch-000001", "epoch-000002"}


@pytest.mark.default_cases("short")
@pytest.mark.parametrize("fail", [raises(errno.EINTR), shortened], ids=["EINTR", "short"])
def test_interrupted_and_short_writes_are_completed(tmp_path, monkeypatch, fail):
    for at in range(1, 1000):
        folder = tmp_path / str(at)
        store = saved(folder, 1)
        faulty = BrokenOs(at, lambda name, real, a: fail(name, real, a) if name == "write" else real(*a))
        with monkeypatch.context() as patch:
            patch.setattr(sealed, "os", faulty)
            take_next(store)
        assert check(folder, at) == "epoch-000002"
        if faulty.calls < at:
            break
    assert at > 25


def test_kill_at_every_call_leaves_the_previous_or_new_checkpoint(tmp_path):
    loaded = []
    for at in range(1, 1000):
        folder = tmp_path / str(at)
        saved(folder, 1)
        child = os.fork()
        if child == 0:
            try:
                sealed.os = BrokenOs(at, dies)  # type: ignore[assignment]  # a fake module
                fresh = Checkpoints(folder / "checkpoints")
                fresh.begin(store_loop())
                take_next(fresh)
            finally:
                os._exit(0)
        killed = os.WIFSIGNALED(os.waitpid(child, 0)[1])
        loaded.append(check(folder, at))
        if not killed:
            break
    assert at > 25 and loaded[0] == "epoch-000001" and loaded[-1] == "epoch-000002"


def store_loop() -> rein.Loop:
    loop = make(1.0)
    loop.run(epochs=1)
    return loop


@pytest.mark.parametrize("as_file", [False, True])
def test_removed_or_replaced_folder_raises_with_the_path(tmp_path, as_file):
    store = Checkpoints(tmp_path / "checkpoints")
    loop = store_loop()
    store.begin(loop)
    store.take(loop, RULES)
    store.flush()
    shutil.rmtree(tmp_path / "checkpoints")
    if as_file:
        (tmp_path / "checkpoints").write_text("")
    store.take(loop, RULES)
    reason = "Not a directory" if as_file else "No such file or directory"
    with pytest.raises(CheckpointError, match=rf"{tmp_path / 'checkpoints'}/epoch-000001\.h5: .*{reason}"):
        store.flush()


def test_files_are_synced_before_older_ones_are_removed(tmp_path, monkeypatch):
    trace: list[str] = []
    store = saved(tmp_path, 1)

    class Traced(BrokenOs):
        def __getattr__(self, name: str) -> Any:
            real = super().__getattr__(name)
            if name not in ("write", "fsync", "replace"):
                return real
            return lambda *a, **k: (trace.append(name), real(*a, **k))[1]

    monkeypatch.setattr(sealed, "os", Traced(0, raises(0)))
    monkeypatch.setattr(checkpoint_folder.Path, "unlink", lambda *a, **k: trace.append("unlink"))
    take_next(store)
    text = " ".join(trace)
    one = "write fsync replace fsync"
    assert text == f"fsync fsync {one} {one} unlink {one} unlink"  # folders; checkpoint, best, latest
