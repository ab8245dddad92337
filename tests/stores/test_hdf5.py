import errno
import gc
import json
import logging
import os
import subprocess
import sys
import threading
import weakref
from itertools import count

import numpy as np
import pytest
import torch

from rein.errors import StoreError
from rein.stores import files, layout
from rein.stores.files import verify
from rein.stores.hdf5 import HDF5Store
from rein.stores.host import to_host
from rein.stores.reader import open_run
from rein.testing import StatefulContract
from rein.testing.store import StoreContract, assert_equal, make_trajectory


class TestHDF5Store(StoreContract):
    def make(self, path):
        return HDF5Store(path, exist="resume")

    def read(self, store):
        return read(store.path)


class TestStateOfHDF5Store(StatefulContract):
    @pytest.fixture(autouse=True)
    def folder(self, tmp_path):
        self.paths = (tmp_path / str(number) for number in count())

    def make(self):
        return HDF5Store(next(self.paths))

    def step(self, store):
        store.append(make_trajectory(store.state_dict()["epoch"] + 1))
        return store.state_dict()


class FullDisk:
    """The module `os` with a disk that takes `room` more writes."""

    def __init__(self, room):
        self.room = room

    def __getattr__(self, name):
        return getattr(os, name)

    def write(self, descriptor, data):
        if self.room == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.room -= 1
        return os.write(descriptor, data)


def read(path):
    run = open_run(path)
    return [run.trajectory(epoch) for epoch in run.epochs["number"]]


def names(path):
    return sorted(file.name for file in (path / "trajectories").iterdir())


def size_of(trajectory):
    return layout.size_of(to_host(trajectory))


def test_files_are_closed_by_epochs(tmp_path):
    store = HDF5Store(tmp_path / "run", max_epochs=3)
    for epoch in range(1, 9):
        store.append(make_trajectory(epoch))
    store.close()
    assert names(store.path) == ["000001-000003.h5", "000004-000006.h5", "000007-000008.h5"]


def test_files_are_closed_by_bytes(tmp_path):
    given = [make_trajectory(epoch) for epoch in range(1, 8)]
    store = HDF5Store(tmp_path / "run", max_bytes=3 * size_of(given[0]) + 100)
    for trajectory in given:
        store.append(trajectory)
    store.close()
    assert names(store.path) == ["000001-000003.h5", "000004-000006.h5", "000007-000007.h5"]


def test_files_are_closed_by_time_even_if_nothing_more_is_appended(tmp_path):
    store = HDF5Store(tmp_path / "run", max_seconds=0.02)
    store.append(make_trajectory(1))
    for _ in range(500):
        if names(store.path) == ["000001-000001.h5"]:
            break
        threading.Event().wait(0.01)
    assert names(store.path) == ["000001-000001.h5"]
    store.close()


@pytest.mark.parametrize("rows_in_a_file", [1, 3, 7])
def test_an_epoch_too_large_for_a_file_is_cut_by_rows_and_read_as_one(tmp_path, rows_in_a_file):
    given = [make_trajectory(epoch, steps=20 if epoch == 2 else 1) for epoch in (1, 2, 3)]
    store = HDF5Store(tmp_path / "run", max_bytes=rows_in_a_file * size_of(given[1]) // 20 + 1)
    for trajectory in given:
        store.append(trajectory)
    store.close()
    parts = [name for name in names(store.path) if name.startswith("000002-part-")]
    assert len(parts) == -(-20 // rows_in_a_file)
    assert parts[1] == "000002-part-02.h5"
    assert_equal(read(store.path), given)
    assert list(open_run(store.path).epochs["length"]) == [1, 20, 1]


def test_each_part_of_an_epoch_has_the_episodes_that_end_in_it_and_its_own_next_observation(tmp_path):
    given = make_trajectory(1, steps=20)
    ends = given.first_step + np.array([3, 11, 19])
    given = given._replace(episodes=given.episodes._replace(last_step=ends))
    store = HDF5Store(tmp_path / "run", max_bytes=size_of(given) // 2 + 1)
    store.append(given)
    store.close()
    first, second = (open_run(store.path / "trajectories" / name) for name in names(store.path))
    assert list(first.epochs["length"]) == list(second.epochs["length"]) == [10]
    assert (list(first.episodes["last_step"]), list(second.episodes["last_step"])) == ([ends[0]], list(ends[1:]))
    observation = given.fields["observation"]["state"]
    assert np.array_equal(first.trajectory(1).next_observation["state"], observation[10])
    assert np.array_equal(second.trajectory(1).next_observation["state"], given.next_observation["state"])


def test_an_epoch_of_which_a_part_is_missing_is_not_there(tmp_path):
    """As after a crash between two parts."""
    given = [make_trajectory(epoch, steps=20 if epoch == 2 else 1) for epoch in (1, 2)]
    store = HDF5Store(tmp_path / "run", max_bytes=size_of(given[1]) // 3 + 1)
    for trajectory in given:
        store.append(trajectory)
    store.close()
    (store.path / "trajectories" / names(store.path)[-1]).unlink()
    assert_equal(read(store.path), given[:1])


def test_only_the_fields_asked_for_are_kept(tmp_path):
    store = HDF5Store(tmp_path / "run", fields=["reward", "action"])
    given = make_trajectory(1)
    store.append(given)
    store.close()
    (kept,) = read(store.path)
    assert set(kept.fields) == {"reward", "action"}
    assert kept.next_observation is None
    assert kept.episodes.final_observation is None
    with pytest.raises(ValueError, match="has no \\['speed'\\]; it has \\['observation', 'action'"):
        HDF5Store(tmp_path / "other", fields=["speed", "reward"]).append(given)


def test_rows_that_are_no_data_are_blank_even_where_valid_is_not_kept(tmp_path):
    given = make_trajectory(1)
    given.fields["valid"][2, 1] = False
    store = HDF5Store(tmp_path / "run", fields=["reward"])
    store.append(given)
    store.close()
    reward = open_run(store.path).field("reward")
    assert np.isnan(reward[2, 1]) and np.isnan(reward).sum() == 1


def test_tensors_of_any_layout_arrive_as_they_are(tmp_path):
    given = make_trajectory(1)
    values_TN = torch.arange(18.0).reshape(3, 6).T  # not contiguous
    odd = {
        "transposed": values_TN,
        "with_graph": (values_TN * torch.ones(1, requires_grad=True)),
        "strided": values_TN.numpy()[:, ::-1],
        "big_endian": values_TN.numpy().astype(">f8"),
    }
    store = HDF5Store(tmp_path / "run")
    store.append(given._replace(fields={**given.fields, **odd}))
    store.close()
    (kept,) = read(store.path)
    for name, value in odd.items():
        value = value.detach().numpy() if isinstance(value, torch.Tensor) else value
        assert np.array_equal(kept.fields[name], value), name
        assert kept.fields[name].dtype.isnative


def test_an_existing_folder_is_an_error_that_says_what_to_do(tmp_path):
    (tmp_path / "empty").mkdir()
    HDF5Store(tmp_path / "empty").close()
    for path in (tmp_path / "empty", tmp_path):
        with pytest.raises(StoreError, match="exist='resume' goes on with it, exist='new' takes the next free name"):
            HDF5Store(path)
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="exist"):
        HDF5Store(tmp_path / "file")


def test_a_folder_that_cannot_be_made_is_an_error_with_the_reason(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="Not a directory"):
        HDF5Store(tmp_path / "file" / "run")


def test_new_takes_the_next_free_name_and_says_so_and_deletes_nothing(tmp_path, caplog):
    paths = []
    with caplog.at_level(logging.WARNING):
        for epoch in (1, 2, 3):
            store = HDF5Store(tmp_path / "runs" / "cartpole", exist="new")
            store.append(make_trajectory(epoch))
            store.close()
            paths.append(store.path)
    assert [path.name for path in paths] == ["cartpole", "cartpole-2", "cartpole-3"]
    assert [read(path)[0].epoch for path in paths] == [1, 2, 3]
    assert [f"goes to {path}" in record.message for path, record in zip(paths[1:], caplog.records, strict=True)] == [
        True
    ] * 2


def test_what_is_said_goes_to_stderr_where_nothing_is_configured(tmp_path):
    code = f"from rein.stores.hdf5 import HDF5Store; HDF5Store({str(tmp_path)!r}, exist='new').close()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", f"{tmp_path} exists; this run goes to {tmp_path}-2\n")


@pytest.mark.parametrize(
    "arguments",
    [
        {"exist": "overwrite"},
        {"max_bytes": 0},
        {"max_epochs": -1},
        {"max_seconds": 0},
        {"fields": []},
        {"fields": "reward"},
    ],
)
def test_arguments_that_make_no_sense_are_refused(tmp_path, arguments):
    with pytest.raises(ValueError, match=next(iter(arguments))):
        HDF5Store(tmp_path / "run", **arguments)
    assert not (tmp_path / "run").exists()


def test_files_newer_than_the_loaded_state_are_moved_aside_and_kept(tmp_path):
    first = HDF5Store(tmp_path / "run", max_epochs=2)
    for epoch in range(1, 4):
        first.append(make_trajectory(epoch))
    state = first.state_dict()
    for epoch in range(4, 8):
        first.append(make_trajectory(epoch))
    first.close()
    newer = {name: (first.path / "trajectories" / name).read_bytes() for name in names(first.path)[2:]}
    for again in ("after-epoch-000003", "after-epoch-000003-2"):
        store = HDF5Store(tmp_path / "run", exist="resume")
        store.load_state_dict(state)
        assert names(store.path) == ["000001-000002.h5", "000003-000003.h5"]
        aside = store.path / "aside" / again
        assert {file.name: file.read_bytes() for file in aside.iterdir()} == newer
        store.append(make_trajectory(4))
        store.close()
        newer = {"000004-000004.h5": (store.path / "trajectories" / "000004-000004.h5").read_bytes()}


def test_a_run_that_begins_anew_in_an_old_folder_moves_the_old_files_aside(tmp_path):
    """Resumed before its first checkpoint was taken: no state is loaded, and epoch 1 comes again."""
    for seed in (0, 1):
        store = HDF5Store(tmp_path / "run", exist="resume")
        store.append(make_trajectory(1, seed=seed))
        store.append(make_trajectory(2, seed=seed))
        store.close()
    assert_equal(read(store.path), [make_trajectory(1, seed=1), make_trajectory(2, seed=1)])
    assert_equal(read(store.path / "aside" / "after-epoch-000000"), [make_trajectory(1), make_trajectory(2)])


def test_the_same_store_can_go_back_to_a_state(tmp_path):
    """As when training returns to the last good checkpoint."""
    store = HDF5Store(tmp_path / "run")
    store.append(make_trajectory(1))
    state = store.state_dict()
    store.append(make_trajectory(2))
    store.load_state_dict(state)
    store.append(make_trajectory(2, seed=1))
    store.close()
    assert_equal(read(store.path), [make_trajectory(1), make_trajectory(2, seed=1)])


def test_a_state_that_ends_within_a_file_is_refused(tmp_path):
    store = HDF5Store(tmp_path / "run")
    for epoch in (1, 2, 3):
        store.append(make_trajectory(epoch))
    with pytest.raises(StoreError, match="does not end at epoch 2"):
        store.load_state_dict({"epoch": 2})
    store.close()


def test_the_same_epochs_give_the_same_bytes(tmp_path):
    stores = [HDF5Store(tmp_path / name) for name in ("one", "other")]
    for store in stores:
        for epoch in (1, 2, 3):
            store.append(make_trajectory(epoch, steps=100))
        store.close()
    one, other = ((store.path / "trajectories" / "000001-000003.h5").read_bytes() for store in stores)
    assert one == other


def test_run_json_is_written_whole_and_read_back(tmp_path):
    store, info = HDF5Store(tmp_path / "run"), {"seed": 1, "versions": {"rein": "0.1"}}
    store.write_run(info)
    store.append(make_trajectory(1))
    store.close()
    assert json.loads((store.path / "run.json").read_text()) == open_run(store.path).info == info


def test_a_store_that_nobody_closed_is_written_at_exit(tmp_path):
    code = f"""
from rein.stores.hdf5 import HDF5Store
from rein.testing.store import make_trajectory
store = HDF5Store({str(tmp_path / "run")!r})
store.append(make_trajectory(1))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert_equal(read(tmp_path / "run"), [make_trajectory(1)])


def test_a_store_that_is_dropped_is_written_and_leaves_nothing(tmp_path):
    store = HDF5Store(tmp_path / "run")
    store.append(make_trajectory(1))
    thread = store._files._writer._thread
    alive = [weakref.ref(store), weakref.ref(store._files)]
    cycle: list = [store]
    cycle.append(cycle)
    del store, cycle
    gc.collect()
    thread.join(10)
    gc.collect()
    assert not thread.is_alive()
    assert [reference() for reference in alive] == [None, None]
    assert_equal(read(tmp_path / "run"), [make_trajectory(1)])


def test_a_full_disk_ends_with_one_clear_error_and_keeps_what_was_safe(tmp_path, monkeypatch):
    """At each write in turn: the process lives, nothing half-written has a name, and closing is quiet afterwards."""
    for room in range(6):
        store = HDF5Store(tmp_path / str(room), max_epochs=1)
        descriptors, safe, last = len(os.listdir("/dev/fd")), 0, 0
        with monkeypatch.context() as patch, pytest.raises(StoreError) as caught:
            patch.setattr(files, "os", FullDisk(room))
            for last in range(1, 100):
                store.append(make_trajectory(last))
                store.flush()
                safe = last
        assert "No space left on device (errno 28); free some space" in str(caught.value)
        assert names(store.path)[-1:] == ([f"{safe:06d}-{safe:06d}.h5"] if safe else [])
        assert f"{last:06d}-{last:06d}.h5" in str(caught.value)
        with pytest.raises(StoreError, match="No space left"):  # space is back, and a gap would be worse than an error
            store.append(make_trajectory(last + 1))
        store.close()
        assert safe == room
        assert [trajectory.epoch for trajectory in (read(store.path) if safe else [])] == list(range(1, safe + 1))
        assert len(os.listdir("/dev/fd")) == descriptors


def test_an_error_of_the_writer_surfaces_at_the_next_append_or_at_close(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "os", FullDisk(0))
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


def test_a_folder_that_disappears_is_an_error_with_the_path(tmp_path):
    store = HDF5Store(tmp_path / "run")
    (store.path / "trajectories").rmdir()
    store.append(make_trajectory(1))
    with pytest.raises(StoreError, match=r"000001-000001\.h5: .* No such file or directory"):
        store.close()


def test_a_second_writer_in_the_same_folder_does_not_write_over_the_first(tmp_path):
    stores = [HDF5Store(tmp_path / "run", exist="resume") for _ in range(2)]
    for store in stores:
        store._resumes = False  # both began when the folder was empty
        store.append(make_trajectory(1))
    stores[0].close()
    with pytest.raises(StoreError, match="is there already; is another process writing to this run"):
        stores[1].close()
    assert len(read(tmp_path / "run")) == 1


def test_every_finished_file_verifies_and_nothing_else_is_left(tmp_path):
    store = HDF5Store(tmp_path / "run", max_epochs=2)
    for epoch in range(1, 8):
        store.append(make_trajectory(epoch))
    store.close()
    for path in (store.path / "trajectories").iterdir():
        verify(path)
    assert len(names(store.path)) == 4
