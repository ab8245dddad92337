"""The folder of a run: existing folders, and files moved aside."""

import logging

import pytest

from rein.errors import StoreError
from rein.store.hdf5 import HDF5Store
from rein.testing.store import assert_equal, make_trajectory
from tests import programs
from tests.store.trajectory_files import names, read


def test_existing_folder_raises_with_advice(tmp_path):
    (tmp_path / "empty").mkdir()
    HDF5Store(tmp_path / "empty").close()
    for path in (tmp_path / "empty", tmp_path):
        with pytest.raises(StoreError, match="exist='resume' continues the run, exist='new' takes the next free name"):
            HDF5Store(path)
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="exist"):
        HDF5Store(tmp_path / "file")


def test_folder_that_cannot_be_created_raises(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="Not a directory"):
        HDF5Store(tmp_path / "file" / "run")


@pytest.mark.parametrize("below", ["", "run"])
@pytest.mark.parametrize("exist", ["error", "resume"])
def test_link_without_a_target_is_named(tmp_path, below, exist):
    (tmp_path / "link").symlink_to(tmp_path / "missing")
    with pytest.raises(StoreError, match=r"link: is a symbolic link to .*missing, which does not exist"):
        HDF5Store(tmp_path / "link" / below, exist)


def test_exist_new_uses_the_next_free_name(tmp_path, caplog):
    paths = []
    with caplog.at_level(logging.WARNING):
        for epoch in (1, 2, 3):
            store = HDF5Store(tmp_path / "runs" / "cartpole", exist="new")
            store.append(make_trajectory(epoch))
            store.close()
            paths.append(store.path)
    assert [path.name for path in paths] == ["cartpole", "cartpole-2", "cartpole-3"]
    assert [read(path)[0].epoch for path in paths] == [1, 2, 3]
    assert [
        f"is stored in {path}" in record.message for path, record in zip(paths[1:], caplog.records, strict=True)
    ] == [True] * 2


def test_warnings_go_to_stderr_without_logging_configuration(tmp_path):
    code = f"from rein.store.hdf5 import HDF5Store; HDF5Store({str(tmp_path)!r}, exist='new').close()"
    done = programs.run("-c", code)
    assert (done.stdout, done.stderr) == ("", f"{tmp_path} exists; this run is stored in {tmp_path}-2\n")


def test_files_newer_than_the_loaded_state_are_moved_aside(tmp_path):
    first = HDF5Store(tmp_path / "run", max_epochs=2)
    for epoch in range(1, 4):
        first.append(make_trajectory(epoch))
    state = first.state_dict()
    for epoch in range(4, 8):
        first.append(make_trajectory(epoch))
    first.close()
    newer = {name: (first.path / "trajectories" / name).read_bytes() for name in names(first.path)[2:]}
    for again in ("epoch-000003", "epoch-000003-2"):
        store = HDF5Store(tmp_path / "run", exist="resume")
        store.load_state_dict(state)
        assert names(store.path) == ["000001-000002.h5", "000003-000003.h5"]
        aside = store.path / "aside" / again
        assert {file.name: file.read_bytes() for file in aside.iterdir()} == newer
        store.append(make_trajectory(4))
        store.close()
        newer = {"000004-000004.h5": (store.path / "trajectories" / "000004-000004.h5").read_bytes()}


def test_store_returns_to_an_earlier_state(tmp_path):
    """As when training returns to the last good checkpoint."""
    store = HDF5Store(tmp_path / "run")
    store.append(make_trajectory(1))
    state = store.state_dict()
    store.append(make_trajectory(2))
    store.load_state_dict(state)
    store.append(make_trajectory(2, seed=1))
    store.close()
    assert_equal(read(store.path), [make_trajectory(1), make_trajectory(2, seed=1)])


def test_new_run_in_an_old_folder_moves_files_aside(tmp_path):
    """If a run is resumed before its first checkpoint, no state is loaded and epoch 1 is repeated."""
    for seed in (0, 1):
        store = HDF5Store(tmp_path / "run", exist="resume")
        store.append(make_trajectory(1, seed=seed))
        store.append(make_trajectory(2, seed=seed))
        store.close()
    assert_equal(read(store.path), [make_trajectory(1, seed=1), make_trajectory(2, seed=1)])
    assert_equal(read(store.path / "aside" / "epoch-000000"), [make_trajectory(1), make_trajectory(2)])


def test_state_that_ends_inside_a_file_raises(tmp_path):
    store = HDF5Store(tmp_path / "run")
    for epoch in (1, 2, 3):
        store.append(make_trajectory(epoch))
    with pytest.raises(StoreError, match="does not end at epoch 2"):
        store.load_state_dict({"epoch": 2})
    store.close()


def test_second_writer_does_not_overwrite_files(tmp_path, monkeypatch):
    monkeypatch.setattr("rein.store.folder.fcntl", None)  # as on Windows, which has no locks
    stores = [HDF5Store(tmp_path / "run", exist="resume") for _ in range(2)]
    for store in stores:
        store._resumes = False  # both started in an empty folder
        store.append(make_trajectory(1))
    stores[0].close()
    with pytest.raises(StoreError, match="exists already; is another process writing to this run"):
        stores[1].close()
    assert len(read(tmp_path / "run")) == 1
