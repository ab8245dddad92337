"""Full disks, removed folders and unclosed stores: errors are raised, and flushed data is never lost."""

import errno
import gc
import os
import subprocess
import sys
import threading
import weakref

import pytest

from rein.errors import StoreError
from rein.store.format import sealed
from rein.store.hdf5 import HDF5Store
from rein.testing.store import assert_equal, make_trajectory
from tests.store.trajectory_files import names, read


class FullDisk:
    """Module `os` with a disk that accepts `room` more writes."""

    def __init__(self, room):
        self.room = room

    def __getattr__(self, name):
        return getattr(os, name)

    def write(self, descriptor, data):
        if self.room == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.room -= 1
        return os.write(descriptor, data)


def test_unclosed_store_is_written_at_exit(tmp_path):
    code = f"""
from rein.store.hdf5 import HDF5Store
from rein.testing.store import make_trajectory
store = HDF5Store({str(tmp_path / "run")!r})
store.append(make_trajectory(1))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert_equal(read(tmp_path / "run"), [make_trajectory(1)])


def test_garbage_collected_store_is_written_and_freed(tmp_path):
    store = HDF5Store(tmp_path / "run")
    store.append(make_trajectory(1))
    thread = store._files._writer._thread
    alive = [weakref.ref(store), weakref.ref(store._files)]
    cycle: list = [store]
    cycle.append(cycle)
    del store, cycle
    gc.collect()
    thread.join()
    gc.collect()
    assert not thread.is_alive()
    assert [reference() for reference in alive] == [None, None]
    assert_equal(read(tmp_path / "run"), [make_trajectory(1)])


def test_full_disk_raises_and_keeps_flushed_epochs(tmp_path, monkeypatch):
    """Fail each write in turn. No incomplete file gets a name, and closing afterwards raises nothing."""
    for room in range(6):
        descriptors, safe, last = len(os.listdir("/dev/fd")), 0, 0
        store = HDF5Store(tmp_path / str(room), max_epochs=1)
        with monkeypatch.context() as patch, pytest.raises(StoreError) as caught:
            patch.setattr(sealed, "os", FullDisk(room))
            for last in range(1, 100):
                store.append(make_trajectory(last))
                store.flush()
                safe = last
        assert "No space left on device (errno 28); free some space" in str(caught.value)
        assert names(store.path)[-1:] == ([f"{safe:06d}-{safe:06d}.h5"] if safe else [])
        assert f"{last:06d}-{last:06d}.h5" in str(caught.value)
        with pytest.raises(StoreError, match="No space left"):  # a gap would be worse than an error
            store.append(make_trajectory(last + 1))
        store.close()
        assert safe == room
        assert [trajectory.epoch for trajectory in (read(store.path) if safe else [])] == list(range(1, safe + 1))
        assert len(os.listdir("/dev/fd")) == descriptors


def test_writer_errors_are_raised_by_the_next_call(tmp_path, monkeypatch):
    monkeypatch.setattr(sealed, "os", FullDisk(0))
    for number, surface in enumerate([HDF5Store.flush, HDF5Store.close, HDF5Store.state_dict]):
        store = HDF5Store(tmp_path / str(number), max_epochs=1)
        store.append(make_trajectory(1))
        with pytest.raises(StoreError, match="No space left on device"):
            surface(store)
        store.close()
    store = HDF5Store(tmp_path / "append", max_epochs=1)
    with pytest.raises(StoreError, match="No space left on device"):
        for epoch in range(1, 100):
            store.append(make_trajectory(epoch))
            threading.Event().wait(0.01)
    store.close()


def test_removed_folder_raises_with_the_path(tmp_path):
    store = HDF5Store(tmp_path / "run")
    (store.path / "trajectories").rmdir()
    store.append(make_trajectory(1))
    with pytest.raises(StoreError, match=r"000001-000001\.h5: .* No such file or directory"):
        store.close()
