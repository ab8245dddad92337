"""Reading runs that are still being written, split epochs, and fields by rows."""

from __future__ import annotations

import os

import numpy as np
import pytest

from rein.errors import StoreError
from rein.store.format.trajectory_reader import MappedFile
from rein.store.hdf5 import HDF5Store
from rein.store.reader import open_run
from rein.testing.store import assert_equal, make_trajectory
from tests.store.trajectory_files import write


def test_followed_run_sees_only_finished_files(tmp_path):
    run = open_run(tmp_path / "run", follow=True)
    assert not run.refresh() and list(run) == [] and len(run.transitions()) == 0 and len(run.sequences(2)) == 0
    assert run.epochs["number"].tolist() == [] and run.episodes["id"].tolist() == [] and run.fields == {}
    with pytest.raises(ValueError, match="no epoch 1; none is stored"):
        run.trajectory(1)
    store, given = HDF5Store(tmp_path / "run"), [make_trajectory(epoch) for epoch in range(1, 6)]
    store.append(given[0])
    assert not run.refresh()  # the epoch is in memory
    store.flush()
    folder = store.path / "trajectories"
    (folder / f".000002-000002.h5.tmp-{os.getpid()}").write_bytes(b"half a file")
    assert run.refresh() and not run.refresh()
    assert_equal(list(run), given[:1])
    kept = run.transitions()
    store.append(given[1])
    store.flush()
    assert run.epochs["number"].tolist() == [1]  # until the next refresh
    assert run.refresh() and run.epochs["number"].tolist() == [1, 2]
    assert len(run.transitions(fields=["reward"])) == 2 * len(open_run(run.files[0]).transitions(fields=["reward"]))
    assert len(kept) == len(open_run(run.files[0]).transitions())
    store.close()


def test_iteration_includes_files_finished_meanwhile(tmp_path):
    store, seen = HDF5Store(tmp_path / "run", max_epochs=1), []
    store.append(make_trajectory(1))
    store.flush()
    for follow, expected in ((False, [1]), (True, [1, 2, 3])):
        seen.clear()
        for trajectory in open_run(tmp_path / "run", follow=follow):
            seen.append(trajectory.epoch)
            if follow and trajectory.epoch < 3:
                store.append(make_trajectory(trajectory.epoch + 1))
                store.flush()
        assert seen == expected
    store.close()


def test_split_epoch_appears_when_all_parts_exist(tmp_path):
    trajectory = make_trajectory(1, steps=200)
    path = write(tmp_path / "run", [trajectory], max_bytes=60_000)
    whole = open_run(path)
    assert len(whole.files) > 2
    last = whole.files[-1]
    away = last.rename(tmp_path / last.name)
    run = open_run(path, follow=True)
    assert run.epochs["number"].tolist() == []
    with pytest.raises(StoreError, match="a part of its only epoch is missing"):
        _ = open_run(path).epochs
    away.rename(last)
    assert run.refresh()
    assert_equal([run.trajectory(1)], [trajectory])


def test_files_moved_aside_disappear_from_a_followed_run(tmp_path):
    store = HDF5Store(tmp_path / "run", max_epochs=1)
    for epoch in (1, 2, 3):
        store.append(make_trajectory(epoch))
    state = {"epoch": 1}
    run = open_run(tmp_path / "run", follow=True)
    store.flush()
    assert run.refresh() and run.epochs["number"].tolist() == [1, 2, 3]
    store.load_state_dict(state)
    store.append(make_trajectory(2, seed=1))
    store.close()
    assert run.refresh()
    assert_equal(list(run), [make_trajectory(1), make_trajectory(2, seed=1)])


def test_iteration_skips_files_that_the_writer_removed(tmp_path):
    store = HDF5Store(tmp_path / "run", max_epochs=1)
    for epoch in (1, 2, 3):
        store.append(make_trajectory(epoch))
    store.flush()
    run = open_run(tmp_path / "run", follow=True)
    assert run.epochs["number"].tolist() == [1, 2, 3]
    first, second, _ = run.files
    first.unlink()
    seen = []
    for trajectory in run:
        seen.append(trajectory.epoch)
        second.unlink(missing_ok=True)
    assert seen == [2, 3]
    second.write_bytes(b"not a trajectory file")
    with pytest.raises(StoreError):
        list(run)
    store.close()


def test_files_of_two_runs_in_one_folder_raise(tmp_path):
    for name, epochs in (("a", (1, 2)), ("b", (2, 3))):
        write(tmp_path / name, (make_trajectory(epoch) for epoch in epochs))
    (tmp_path / "b/trajectories/000002-000003.h5").rename(tmp_path / "a/trajectories/000002-000003.h5")
    with pytest.raises(
        StoreError, match=r"000002-000003\.h5: begins with epoch 2, but the file before it ends with epoch 2"
    ):
        _ = open_run(tmp_path / "a").epochs


@pytest.fixture
def path(tmp_path):
    store = HDF5Store(tmp_path / "run", max_epochs=1)
    for epoch in range(1, 4):
        store.append(make_trajectory(epoch, steps=400))
    store.close()
    return store.path


def test_field_reads_only_the_files_of_its_rows(path, monkeypatch):
    run = open_run(path)
    whole = {name: run.field(name) for name in ("action", "reward", "terminated", "observation/camera/left")}
    read, original = [], MappedFile.read
    monkeypatch.setattr(MappedFile, "read", lambda f, s, *r: read.append(f.path.name) or original(f, s, *r))
    for name, array in whole.items():
        for rows, files in (
            (slice(410, 417), [2]),
            (slice(399, 801), [1, 2, 3]),
            (slice(-3, None), [3]),
            (slice(5, 5), [1]),
            (slice(2000, None), [1]),
        ):
            read.clear()
            assert np.array_equal(run.field(name, rows), array[rows]), (name, rows)
            assert read == [f"{number:06d}-{number:06d}.h5" for number in files]
    with pytest.raises(ValueError, match="the step must be 1"):
        run.field("reward", slice(0, 9, 2))


def is_map(array):
    """Return whether the bytes of an array are a memory map of rein, so that no array owns them."""
    while isinstance(array, np.ndarray) and not array.flags.owndata and array.base is not None:
        array = array.base
    return not isinstance(array, np.ndarray)


def test_floats_of_one_file_are_a_read_only_map(path):
    run = open_run(path)
    mapped = run.field("reward", slice(400, 800))
    assert is_map(mapped) and not mapped.flags.writeable and mapped.ctypes.data % 64 == 0
    assert is_map(run.field("observation/state", slice(0, 300)))
    assert is_map(open_run(run.files[0]).field("reward"))
    assert not is_map(run.field("action", slice(0, 9)))
    assert run.field("reward").flags.writeable


def test_small_float_arrays_are_read_only_copies(path):
    few = open_run(path).field("reward", slice(400, 409))
    assert not is_map(few) and not few.flags.writeable
