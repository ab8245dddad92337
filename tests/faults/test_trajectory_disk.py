"""Disks that are full or fail while trajectories are written: one error that says why, and what was safe stays so."""

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
from rein.testing.store import assert_equal, make_trajectory

FULL = Path(__file__).with_name("full_disk.py")
CALLS = ("open", "write", "fsync", "close", "replace", "unlink")


class Faulty:
    """The module `os`, in which calls that change the disk go wrong: the `failing`th, or all from that one on."""

    def __init__(self, failing: int, code: int, for_good: bool) -> None:
        self.calls, self.failing, self.code, self.for_good = 0, failing, code, for_good

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name not in CALLS:
            return real

        def call(*arguments: Any, **options: Any) -> Any:
            self.calls += 1
            if self.calls == self.failing or (self.for_good and self.calls > self.failing):
                if name == "close":  # Linux closes, then reports
                    real(*arguments)
                raise OSError(self.code, os.strerror(self.code))
            return real(*arguments, **options)

        return call


def train(store: HDF5Store, epochs: int) -> None:
    """A whole run, of which every epoch is a file."""
    environment = Gridworld(num_envs=2, seed=0)
    agent = QLearning(environment.single_observation_space, environment.single_action_space, seed=0)
    rein.training_loop(agent, environment, store, seed=0).run(epochs=epochs, iterations=3)


def append(store: HDF5Store, epochs: int) -> None:
    """Epochs in parts of several writes, each waited for."""
    for epoch in range(1, epochs + 1):
        store.append(make_trajectory(epoch))
        store.flush()


def state_of() -> tuple[int, int]:
    """Open descriptors and threads."""
    return len(os.listdir("/dev/fd")), threading.active_count()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("for_good", [False, True], ids=["once", "for good"])
@pytest.mark.parametrize("work", [append, train])
def test_an_error_at_every_call_is_told_once_and_leaves_whole_files(
    tmp_path: Path, monkeypatch: Any, caplog: Any, scale: Any, work: Any, for_good: bool, code: int
) -> None:
    train(HDF5Store(tmp_path / "warm"), 1)  # opens what stays open
    told = 0
    for at in range(1, 1000, scale(1, 13)):
        caplog.clear()
        store, before = HDF5Store(tmp_path / str(at), max_epochs=1), state_of()
        faulty = Faulty(at, code, for_good)
        with monkeypatch.context() as patch:
            patch.setattr(sealed, "os", faulty)
            try:
                work(store, 4)
                store.close()
            except StoreError as error:
                assert str(error).startswith(f"{store.path}/"), error
                assert "trajectories" in str(error) or work is train  # which writes run.json before
                assert os.strerror(code) in str(error)
                assert ("free some space" in str(error)) == (code == errno.ENOSPC)
                told += 1
            else:  # a plot of metrics is reported and left alone
                assert faulty.calls < at or "metrics.h5: is no longer written" in caplog.text, "it was swallowed"
            store.close()  # quietly: it was told
        if faulty.calls < at:
            break
        check(store.path, before)
    else:
        raise AssertionError("there was no end of calls")
    assert told >= scale(16, 2)
    print(f"{errno.errorcode[code]} {'from a call on' if for_good else 'at a call'}, {work.__name__}: {told} told")


def check(path: Path, before: tuple[int, int]) -> None:
    """What a failure left: whole files of the first epochs, and after the next start nothing else."""
    descriptors, threads = state_of()
    assert descriptors < before[0] and threads < before[1]  # its own, and not one more
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


def test_what_was_acknowledged_before_an_error_is_there_to_the_bit(tmp_path: Path, monkeypatch: Any) -> None:
    store = HDF5Store(tmp_path / "run", max_epochs=1)
    append(store, 3)
    monkeypatch.setattr(sealed, "os", Faulty(3, errno.EIO, True))
    store.append(make_trajectory(4))
    with pytest.raises(StoreError, match=r"000004-000004\.h5: .* Input/output error \(errno 5\)"):
        store.flush()
    assert_equal(list(rein.open_run(store.path)), [make_trajectory(epoch) for epoch in (1, 2, 3)])
    store.close()


MOUNT = ["unshare", "-Urm", "sh", "-c", 'mount -t tmpfs -o size="$0" tmpfs "$1" && shift && exec "$@"']


def on_small_disk(folder: Path, size: int, command: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a command in whose eyes `folder` is a disk of its own, of that size; it is gone afterwards."""
    folder.mkdir()
    return subprocess.run([*MOUNT, str(size), str(folder), *command], capture_output=True, text=True)


def can_mount(folder: Path) -> bool:
    """Whether this system lets its users have disks of their own; elsewhere one is simulated."""
    try:
        return on_small_disk(folder, 1 << 20, ["true"]).returncode == 0
    except OSError:
        return False


def test_a_run_that_fills_its_disk_ends_with_one_error_and_goes_on_when_there_is_room(
    tmp_path: Path, scale: Callable[[int, int], int]
) -> None:
    mounts, size = can_mount(tmp_path / "try"), 3 << 20
    for how in ("late", "ahead")[: scale(2, 1)]:
        place = tmp_path / how
        command = [sys.executable, str(FULL), str(place), how]
        if mounts:
            done = on_small_disk(place, size, command)
        else:
            place.mkdir()
            done = subprocess.run([*command, str(size)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "Traceback" not in done.stderr
        said = json.loads(done.stdout)
        (error,) = said["errors"]
        whole = list(range(1, said["safe"] + 1))
        name = f"{whole[-1] + 1:06d}-{whole[-1] + 1:06d}.h5"
        assert error.startswith(f"{place}/run/trajectories/{name}: ") and "No space left on device" in error
        assert ("MiB are needed" in error) == (how == "ahead")
        assert said["status"] == "failed" and said["safe"] >= 5
        assert said["full"] == {"files": len(whole), "epochs": whole, "read": len(whole)}
        assert said["left"] == [] and said["descriptors"] <= 0 and said["threads"] <= 0
        again = list(range(1, said["safe"] + 3))
        assert said["resumed"] == {"files": len(again), "epochs": again, "read": len(again)}
        what = "a disk of 3 MiB" if mounts else "what is simulated to be a disk of 3 MiB"
        print(f"full disk, told {how}: {what} took {len(whole)} epochs, all of them whole; one StoreError; resumed")


@pytest.mark.parametrize("superuser", [False, True])
def test_what_the_disk_has_no_room_for_is_not_begun(tmp_path: Path, monkeypatch: Any, superuser: bool) -> None:
    """Neither are disks refused that do not say how large they are, nor what the superuser alone may have."""
    said: dict[str, Any] = {"f_frsize": 4096, "f_blocks": 100, "f_bfree": 3, "f_bavail": 1}
    monkeypatch.setattr(os, "geteuid", lambda: 0 if superuser else 1000)
    monkeypatch.setattr(os, "statvfs", lambda folder: types.SimpleNamespace(**said))
    room = 4096 * (3 if superuser else 1)
    write_whole(tmp_path / "fits.h5", bytes(room))
    monkeypatch.setattr(sealed, "_write", lambda *_: pytest.fail("it was begun"))
    sizes = f"1.0 MiB are needed, {room / 2**20:.1f} MiB are free"
    with pytest.raises(StoreError, match=rf"large\.h5: 1,049,000 bytes .*: {sizes} \(errno 28\); free some space"):
        write_whole(tmp_path / "large.h5", bytes(1_049_000))
    assert [path.name for path in tmp_path.iterdir()] == ["fits.h5"]
    monkeypatch.undo()
    monkeypatch.setattr(os, "statvfs", lambda folder: types.SimpleNamespace(**said | {"f_blocks": 0}))
    write_whole(tmp_path / "unknown.h5", bytes(1_049_000))
    monkeypatch.setattr(os, "statvfs", lambda folder: (_ for _ in ()).throw(OSError(errno.ENOSYS, "no such call")))
    write_whole(tmp_path / "untold.h5", bytes(1_049_000))
    with pytest.raises(StoreError, match=r"nowhere/large\.h5: .* No such file or directory"):
        write_whole(tmp_path / "nowhere" / "large.h5", bytes(10))


def test_the_command_line_tells_of_a_full_disk_in_its_last_line(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """The run's first file of trajectories is the first that is too large."""
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
