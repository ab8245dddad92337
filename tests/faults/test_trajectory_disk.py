"""Full and failing disks while trajectories are written: one error with the reason, and no loss of flushed data."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import rein
from rein.agents.q_learning import QLearning
from rein.cli import main
from rein.envs.gridworld import Gridworld
from rein.errors import StoreError
from rein.store.folder import list_files
from rein.store.format import sealed
from rein.store.format.sealed import verify, write_whole
from rein.store.hdf5 import HDF5Store
from rein.testing.store import make_trajectory
from tests import programs
from tests.faults import broken_os
from tests.faults.broken_os import BrokenOs, raises

FULL = Path(__file__).with_name("full_disk.py")
CALLS = (*broken_os.CALLS, "unlink")


def train(store: HDF5Store, epochs: int) -> None:
    """Train a run with one file per epoch."""
    environment = Gridworld(num_envs=2, seed=0)
    agent = QLearning(environment.single_observation_space, environment.single_action_space, seed=0)
    rein.training_loop(agent, environment, store, seed=0).run(epochs=epochs, iterations=3)


def append(store: HDF5Store, epochs: int) -> None:
    """Append epochs and flush after each."""
    for epoch in range(1, epochs + 1):
        store.append(make_trajectory(epoch))
        store.flush()


def state_of() -> tuple[int, int]:
    """Return the numbers of open descriptors and threads."""
    return len(os.listdir("/dev/fd")), threading.active_count()


@pytest.mark.default_cases("append-once-28", "append-for good-5", "train-once-28", "train-for good-5")
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("for_good", [False, True], ids=["once", "for good"])
@pytest.mark.parametrize("work", [append, train])
def test_failing_call_raises_once_and_leaves_complete_files(
    tmp_path: Path, monkeypatch: Any, caplog: Any, scale: Any, work: Any, for_good: bool, code: int
) -> None:
    train(HDF5Store(tmp_path / "warm"), 1)  # opens descriptors that stay open
    raised = 0
    for at in range(1, 1000, scale(1, 13)):
        caplog.clear()
        store, before = HDF5Store(tmp_path / str(at), max_epochs=1), state_of()
        faulty = BrokenOs(at, raises(code), CALLS, for_good)
        with monkeypatch.context() as patch:
            patch.setattr(sealed, "os", faulty)
            try:
                work(store, 4)
                store.close()
            except StoreError as error:
                assert str(error).startswith(f"{store.path}/"), error
                assert "trajectories" in str(error) or work is train  # `train` writes run.json first
                assert os.strerror(code) in str(error)
                assert ("free some space" in str(error)) == (code == errno.ENOSPC)
                raised += 1
            else:  # errors of metrics files, of the status in run.json and of the last checkpoint are only logged
                texts = ("is no longer written", "run.json has no status", "was not saved")
                logged = any(text in caplog.text for text in texts)
                assert faulty.calls < at or logged, "error was swallowed"
            store.close()  # does not raise the error again
        if faulty.calls < at:
            break
        check(store.path, before)
    else:
        raise AssertionError("the number of calls has no end")
    assert raised >= scale(16, 2)
    print(f"{errno.errorcode[code]} {'from a call on' if for_good else 'at a call'}, {work.__name__}: {raised} raised")


def check(path: Path, before: tuple[int, int]) -> None:
    """Check that a failure left only complete files of the first epochs after the next start."""
    descriptors, threads = state_of()
    assert descriptors < before[0] and threads < before[1]  # those of the store were closed
    whole = list_files(path / "trajectories")
    for file in whole:
        verify(file)
    left = {entry.name for entry in (path / "trajectories").iterdir()} - {file.name for file in whole}
    assert len(left) <= 1 and all(name.endswith(f".tmp-{os.getpid()}") for name in left)
    HDF5Store(path, exist="resume").close()
    assert list_files(path / "trajectories") == whole == sorted((path / "trajectories").iterdir())
    if whole:
        run = rein.open_run(path)
        assert run.epochs["number"].tolist() == list(range(1, len(whole) + 1)) == [t.epoch for t in run]


MOUNT = ["unshare", "-Urm", "sh", "-c", 'mount -t tmpfs -o size="$0" tmpfs "$1" && shift && exec "$@"']


def on_small_disk(folder: Path, size: int, command: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a command for which `folder` is a separate disk of that size. The disk is gone afterwards."""
    folder.mkdir()
    return subprocess.run([*MOUNT, str(size), str(folder), *command], capture_output=True, text=True)


def can_mount(folder: Path) -> bool:
    """Return whether this system lets users mount disks. Otherwise a disk is simulated."""
    try:
        return on_small_disk(folder, 1 << 20, ["true"]).returncode == 0
    except OSError:
        return False


def test_run_on_a_full_disk_raises_once_and_resumes_later(tmp_path: Path, scale: Callable[[int, int], int]) -> None:
    mounts, size = can_mount(tmp_path / "try"), 3 << 20
    for how in ("late", "ahead")[: scale(2, 1)]:
        place = tmp_path / how
        if mounts:
            done = on_small_disk(place, size, [sys.executable, str(FULL), str(place), how])
        else:
            place.mkdir()
            done = programs.run(FULL, place, how, size)
        assert done.returncode == 0, done.stderr
        assert "Traceback" not in done.stderr
        report = json.loads(done.stdout)
        (error,) = report["errors"]
        whole = list(range(1, report["safe"] + 1))
        name = f"{whole[-1] + 1:06d}-{whole[-1] + 1:06d}.h5"
        assert error.startswith(f"{place}/run/trajectories/{name}: ") and "No space left on device" in error
        assert ("MiB are needed" in error) == (how == "ahead")
        assert report["status"] == "failed" and report["safe"] >= 5
        assert report["full"] == {"files": len(whole), "epochs": whole, "read": len(whole)}
        assert report["left"] == [] and report["descriptors"] <= 0 and report["threads"] <= 0
        again = list(range(1, report["safe"] + 3))
        assert report["resumed"] == {"files": len(again), "epochs": again, "read": len(again)}
        disk = "disk of 3 MiB" if mounts else "simulated disk of 3 MiB"
        print(f"full {disk}, detected {how}: {len(whole)} complete epochs; one StoreError; resumed")


def test_command_line_reports_a_full_disk_in_its_last_line(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """The first trajectory file of the run does not fit."""
    real = sealed.check_room
    too_large = types.SimpleNamespace(f_blocks=10, f_bavail=1, f_bfree=1, f_frsize=4096)

    def check_room(folder: Path, size: int) -> None:
        with monkeypatch.context() as patch:
            if folder.name == "trajectories":
                patch.setattr(os, "statvfs", lambda folder: too_large)
            real(folder, size)

    monkeypatch.setattr(sealed, "check_room", check_room)
    with pytest.raises(SystemExit) as end:
        main(["train", "gridworld", "--run", str(tmp_path / "run"), "--quiet", "--epochs", "3"])
    last = capsys.readouterr().err.splitlines()[-1]
    assert end.value.code == 1
    assert last.startswith(f"rein: {tmp_path}/run/trajectories/000001-000003.h5: ") and "0.0 MiB are free" in last


@pytest.mark.parametrize("superuser", [False, True])
def test_write_without_enough_disk_space_is_not_started(tmp_path: Path, monkeypatch: Any, superuser: bool) -> None:
    """Disks that do not report their size are tried, and the superuser may use the reserved blocks."""
    status: dict[str, Any] = {"f_frsize": 4096, "f_blocks": 100, "f_bfree": 3, "f_bavail": 1}
    monkeypatch.setattr(os, "geteuid", lambda: 0 if superuser else 1000)
    monkeypatch.setattr(os, "statvfs", lambda folder: types.SimpleNamespace(**status))
    room = 4096 * (3 if superuser else 1)
    write_whole(tmp_path / "fits.h5", bytes(room))
    monkeypatch.setattr(sealed, "_write", lambda *_: pytest.fail("the write was started"))
    sizes = f"1.0 MiB are needed, {room / 2**20:.1f} MiB are free"
    with pytest.raises(StoreError, match=rf"large\.h5: 1,049,000 bytes .*: {sizes} \(errno 28\); free some space"):
        write_whole(tmp_path / "large.h5", bytes(1_049_000))
    assert [path.name for path in tmp_path.iterdir()] == ["fits.h5"]
    monkeypatch.undo()
    monkeypatch.setattr(os, "statvfs", lambda folder: types.SimpleNamespace(**status | {"f_blocks": 0}))
    write_whole(tmp_path / "unknown.h5", bytes(1_049_000))
    monkeypatch.setattr(os, "statvfs", lambda folder: (_ for _ in ()).throw(OSError(errno.ENOSYS, "no such call")))
    write_whole(tmp_path / "unsupported.h5", bytes(1_049_000))
    with pytest.raises(StoreError, match=r"nowhere/large\.h5: .* No such file or directory"):
        write_whole(tmp_path / "nowhere" / "large.h5", bytes(10))
