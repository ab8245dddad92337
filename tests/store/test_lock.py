"""The lock on the folder of a run: only one store may write, and the lock ends with the store or the process."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import rein
from rein.errors import StoreError
from rein.store.checkpoint_file import write_checkpoint
from rein.store.folder import Lock, is_locked, keep_stores_out
from rein.store.hdf5 import HDF5Store
from rein.testing.store import make_trajectory
from tests import programs

pytestmark = pytest.mark.skipif(os.name != "posix", reason="folders are not locked on Windows")

OTHER = """
import sys
from rein.errors import StoreError
from rein.store.hdf5 import HDF5Store

try:
    HDF5Store(sys.argv[1], "resume").close()
except StoreError as error:
    print(error)
"""

WITH_A_WORKER = """
import os, sys, time
from rein.store.hdf5 import HDF5Store

store = HDF5Store(sys.argv[1])
if not os.fork():
    print(os.getpid(), flush=True)  # the worker runs and has closed the lock's descriptor
    time.sleep(60)
    os._exit(0)
time.sleep(60)
"""


def opened_by_another_process(path: Path) -> str:
    """Open the store in another process and return its output."""
    return programs.run("-c", OTHER, path).stdout


def test_second_process_cannot_open_a_run(tmp_path):
    store = HDF5Store(tmp_path / "run")
    output = opened_by_another_process(store.path)
    assert output.startswith(f"{store.path}: another process is writing to it")
    store.close()
    assert opened_by_another_process(store.path) == ""


def test_second_store_of_one_process_is_refused_at_once(tmp_path):
    first = HDF5Store(tmp_path / "run")
    with pytest.raises(StoreError, match=r"this process .* close\(\)"):
        HDF5Store(tmp_path / "run", "resume")
    assert opened_by_another_process(first.path)  # the first store still holds the lock
    first.close()
    HDF5Store(tmp_path / "run", "resume").close()
    assert not opened_by_another_process(first.path)


@pytest.mark.parametrize("fails", [False, True])
def test_store_whose_run_has_ended_is_closed_when_another_one_opens(tmp_path, fails):
    def handler(state):
        if fails:
            raise RuntimeError("a mistake in a notebook")

    def build(exist):
        environment = rein.envs.Gridworld(2, seed=0)
        store = HDF5Store(tmp_path / "run", exist)
        return rein.training_loop(rein.QLearning(environment, seed=0), environment, store, iterations=4, epochs=1)

    first = build("error")
    first.epoch_ended(handler)
    with pytest.raises(RuntimeError) if fails else contextlib.nullcontext():
        first.run()
    second = build("resume")
    with pytest.raises(StoreError, match="closed"):
        first.run(epochs=2)
    assert second.run().epoch == 1


@pytest.mark.parametrize("fails", [False, True])
def test_store_that_is_no_longer_referenced_does_not_block_the_next_one(tmp_path, monkeypatch, fails):
    store = HDF5Store(tmp_path / "run")
    store.append(make_trajectory(1))
    if fails:
        (tmp_path / "run/trajectories/000001-000001.h5").touch()
        with pytest.raises(StoreError, match="exists already"):
            store.flush()
    store.cycle = store
    del store
    HDF5Store(tmp_path / "run", "resume").close()
    assert fails or rein.open_run(tmp_path / "run").epochs["number"].tolist() == [1]


def test_lock_may_be_released_twice(tmp_path):
    lock = Lock(tmp_path)
    lock.release()
    lock.release()
    assert not is_locked(tmp_path)


def test_lock_is_held_until_the_last_checkpoint_is_written(tmp_path, monkeypatch):
    store, seen = HDF5Store(tmp_path / "run"), []

    def look(*arguments):
        time.sleep(0.1)  # while the store closes
        assert is_locked(store.path)
        seen.append(write_checkpoint(*arguments))

    monkeypatch.setattr("rein.store.checkpoint_folder.write_checkpoint", look)
    store.checkpoints.take(rein.Loop(lambda state: None), {})
    store.close()
    assert len(seen) == 1
    assert not is_locked(store.path)


@pytest.mark.slow
def test_surviving_workers_do_not_keep_the_lock(tmp_path):
    path = tmp_path / "run"
    process = subprocess.Popen([sys.executable, "-c", WITH_A_WORKER, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    worker = int(process.stdout.readline())
    try:
        with pytest.raises(StoreError, match="another process is writing to it"):
            HDF5Store(path, "resume")
        process.send_signal(signal.SIGKILL)
        process.wait()
        HDF5Store(path, "resume").close()
        os.kill(worker, 0)  # the worker is alive
    finally:
        process.kill()
        process.stdout.close()
        os.kill(worker, signal.SIGKILL)


def test_store_works_on_a_file_system_without_locks(tmp_path, monkeypatch):
    """Such a file system refuses to lock and to unlock, so only an acquired lock may be released."""

    def refuse(descriptor, operation):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr("rein.store.folder.fcntl.flock", refuse)
    before = len(os.listdir("/dev/fd"))
    store = HDF5Store(tmp_path / "run")
    store.close()
    HDF5Store(tmp_path / "run", "resume").close()
    assert len(os.listdir("/dev/fd")) == before
    assert not is_locked(tmp_path / "run")


def test_keep_stores_out_prevents_opening(tmp_path):
    with keep_stores_out(tmp_path):
        assert "writing" in opened_by_another_process(tmp_path)
        with pytest.raises(StoreError, match="writing"):
            Lock(tmp_path)
    Lock(tmp_path).release()


def test_keep_stores_out_raises_while_a_store_is_open(tmp_path):
    lock = Lock(tmp_path)
    with pytest.raises(StoreError, match="writing"), keep_stores_out(tmp_path):
        pass
    lock.release()
