import functools

import numpy as np
import pytest

from rein.errors import StoreError
from rein.store.format import sealed
from rein.store.hdf5 import HDF5Store
from rein.store.reader import open_run
from rein.testing.store import assert_equal, make_trajectory


@pytest.fixture
def given():
    return [make_trajectory(epoch, steps=epoch) for epoch in range(1, 6)]


@pytest.fixture
def path(tmp_path, given):
    store = HDF5Store(tmp_path / "run", max_epochs=2)
    for trajectory in given:
        store.append(trajectory)
    store.close()
    return store.path


def test_run_joins_the_tables_of_all_files(path, given):
    run = open_run(path)
    assert len(run.files) == 3
    assert list(run.epochs["number"]) == [1, 2, 3, 4, 5]
    assert list(run.epochs["length"]) == [1, 2, 3, 4, 5]
    assert list(run.epochs["first_row"]) == [0, 1, 3, 6, 10]
    assert list(run.epochs["status"]) == [trajectory.status for trajectory in given]
    assert list(run.epochs["metrics"]["episode_return"]) == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert list(run.epochs["clocks"]["env_steps"]) == [trajectory.clocks["env_steps"] for trajectory in given]
    assert np.array_equal(run.episodes["return"], np.concatenate([t.episodes.episode_return for t in given]))
    assert list(run.episodes["epoch"]) == [number for number in range(1, 6) for _ in range(3)]


def test_fields_are_joined_and_found_by_path(path, given):
    run = open_run(path)
    assert run.fields["observation/camera/left"] == (np.dtype(np.uint8), (15, 3, 4, 5, 3))
    assert np.array_equal(run.field("reward"), np.concatenate([t.fields["reward"] for t in given]))
    state = np.concatenate([t.fields["observation"]["state"] for t in given])
    for found in (run.field("observation/state"), run.field("observation")["state"]):
        assert np.array_equal(found, state)


def test_single_file_opens_as_a_run(path, given):
    run = open_run(path / "trajectories" / "000003-000004.h5")
    assert_equal([run.trajectory(epoch) for epoch in (3, 4)], given[2:4])


def test_missing_field_epoch_and_run_raise(path):
    run = open_run(path)
    with pytest.raises(ValueError, match="no field 'rewards'; the fields are action, observation/camera/depth"):
        run.field("rewards")
    with pytest.raises(ValueError, match="no epoch 9; 5 are stored, 1 to 5"):
        run.trajectory(9)
    with pytest.raises(StoreError, match=r"no trajectories.*give the folder of a run"):
        open_run(path / "missing")


def test_opening_a_run_reads_no_file(path, monkeypatch):
    monkeypatch.setattr(sealed, "verify", lambda path: pytest.fail(f"{path} was read"))
    open_run(path)


def test_file_is_hashed_once_unless_it_changes(path, monkeypatch):
    hashed, verify = [], sealed.verify
    monkeypatch.setattr(sealed, "verify", lambda path: (hashed.append(path.name), verify(path)))
    run = open_run(path)
    for epoch in (1, 2, 5, 1):
        run.trajectory(epoch)
    run.field("reward")
    assert sorted(hashed) == ["000001-000002.h5", "000003-000004.h5", "000005-000005.h5"]
    damaged = path / "trajectories" / "000001-000002.h5"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    with pytest.raises(StoreError, match="000001-000002"):
        run.trajectory(1)


def test_damaged_file_raises_for_every_access(path):
    damaged = path / "trajectories" / "000003-000004.h5"
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    for read in (
        lambda run: run.epochs,
        lambda run: run.episodes,
        lambda run: run.field("reward"),
        lambda run: run.trajectory(1),
    ):
        with pytest.raises(StoreError, match=r"000003-000004\.h5: is damaged"):
            read(open_run(path))


def test_invalid_run_json_raises(path):
    assert open_run(path).info == {}
    for text in ("", "[1]", "{", "[" * 100_000):
        (path / "run.json").write_text(text)
        with pytest.raises(StoreError, match=r"run\.json: cannot be read as JSON"):
            _ = open_run(path).info


def test_every_level_of_dictionaries_that_is_written_is_read(tmp_path):
    def nested(levels):
        given = make_trajectory(1)
        inner = functools.reduce(lambda inner, _: {"a": inner}, range(levels), given.fields["reward"])
        return given._replace(fields={**given.fields, "extra": inner})

    store = HDF5Store(tmp_path / "run")
    store.append(nested(31))
    with pytest.raises(ValueError, match=r"extra\.a.*levels"):
        store.append(nested(32)._replace(epoch=2))
    store.close()
    assert_equal([*open_run(store.path)], [nested(31)])
