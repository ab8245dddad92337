import contextlib
import threading
from itertools import count

import numpy as np
import pytest
import torch

import rein
from rein.agents.q_learning import QLearning
from rein.envs.gridworld import Gridworld
from rein.ops.trees import map_tree
from rein.store.format import trajectory_writer
from rein.store.hdf5 import HDF5Store
from rein.store.memory_store import to_host
from rein.store.reader import open_run
from rein.testing import StatefulContract
from rein.testing.store import StoreContract, assert_equal, make_trajectory
from tests.store.trajectory_files import names, read, write


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


def size_of(trajectory):
    return trajectory_writer.size_of(to_host(trajectory))


def test_max_bytes_ends_a_file(tmp_path):
    given = [make_trajectory(epoch) for epoch in range(1, 8)]
    path = write(tmp_path / "run", given, max_bytes=3 * size_of(given[0]) + 100)
    assert names(path) == ["000001-000003.h5", "000004-000006.h5", "000007-000007.h5"]


def test_max_seconds_ends_a_file_without_another_append(tmp_path):
    store = HDF5Store(tmp_path / "run", max_seconds=0.02)
    store.append(make_trajectory(1))
    for _ in range(500):
        if names(store.path) == ["000001-000001.h5"]:
            break
        threading.Event().wait(0.01)
    assert names(store.path) == ["000001-000001.h5"]
    store.close()


@pytest.mark.parametrize("rows_in_a_file", [1, 3, 7])
def test_large_epoch_is_split_and_read_as_one(tmp_path, rows_in_a_file):
    given = [make_trajectory(epoch, steps=20 if epoch == 2 else 1) for epoch in (1, 2, 3)]
    path = write(tmp_path / "run", given, max_bytes=rows_in_a_file * size_of(given[1]) // 20 + 1)
    parts = [name for name in names(path) if name.startswith("000002-part-")]
    assert len(parts) == -(-20 // rows_in_a_file)
    assert parts[1] == "000002-part-02.h5"
    assert_equal(read(path), given)
    assert list(open_run(path).epochs["length"]) == [1, 20, 1]


def test_each_part_has_its_episodes_and_next_observation(tmp_path):
    given = make_trajectory(1, steps=20)
    ends = given.first_step + np.array([3, 11, 19])
    given = given._replace(episodes=given.episodes._replace(last_step=ends))
    path = write(tmp_path / "run", [given], max_bytes=size_of(given) // 2 + 1)
    first, second = (open_run(path / "trajectories" / name) for name in names(path))
    assert list(first.epochs["length"]) == list(second.epochs["length"]) == [10]
    assert (list(first.episodes["last_step"]), list(second.episodes["last_step"])) == ([ends[0]], list(ends[1:]))
    observation = given.fields["observation"]["state"]
    assert np.array_equal(first.trajectory(1).next_observation["state"], observation[10])
    assert np.array_equal(second.trajectory(1).next_observation["state"], given.next_observation["state"])


def test_epoch_with_a_missing_part_is_not_listed(tmp_path):
    """For example after a crash between two parts."""
    given = [make_trajectory(epoch, steps=20 if epoch == 2 else 1) for epoch in (1, 2)]
    path = write(tmp_path / "run", given, max_bytes=size_of(given[1]) // 3 + 1)
    (path / "trajectories" / names(path)[-1]).unlink()
    assert_equal(read(path), given[:1])


def test_only_requested_fields_and_valid_are_kept(tmp_path):
    store = HDF5Store(tmp_path / "run", fields=["reward", "action"])
    given = make_trajectory(1)
    store.append(given)
    store.close()
    (kept,) = read(store.path)
    assert set(kept.fields) == {"reward", "action", "valid"}
    assert kept.next_observation is None
    assert kept.episodes.final_observation is None
    with pytest.raises(ValueError, match="has no \\['speed'\\]; it has \\['observation', 'action'"):
        HDF5Store(tmp_path / "other", fields=["speed", "reward"]).append(given)


def test_invalid_rows_are_blank_and_flagged(tmp_path):
    given = make_trajectory(1)
    given.fields["valid"][2, 1] = False
    path = write(tmp_path / "run", [given], fields=["reward"])
    run = open_run(path)
    reward = run.field("reward")
    assert np.isnan(reward[2, 1]) and np.isnan(reward).sum() == 1
    assert (run.field("valid")[()] == ~np.isnan(reward)).all()


def test_tensors_of_any_layout_are_stored_correctly(tmp_path):
    given = make_trajectory(1)
    values_TN = torch.arange(18.0).reshape(3, 6).T  # not contiguous
    odd = {
        "transposed": values_TN,
        "with_graph": (values_TN * torch.ones(1, requires_grad=True)),
        "strided": values_TN.numpy()[:, ::-1],
        "big_endian": values_TN.numpy().astype(">f8"),
    }
    path = write(tmp_path / "run", [given._replace(fields={**given.fields, **odd})])
    (kept,) = read(path)
    for name, value in odd.items():
        value = value.detach().numpy() if isinstance(value, torch.Tensor) else value
        assert np.array_equal(kept.fields[name], value), name
        assert kept.fields[name].dtype.isnative


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
def test_invalid_arguments_raise(tmp_path, arguments):
    with pytest.raises(ValueError, match=next(iter(arguments))):
        HDF5Store(tmp_path / "run", **arguments)
    assert not (tmp_path / "run").exists()


def test_equal_epochs_give_equal_bytes(tmp_path):
    stores = [HDF5Store(tmp_path / name) for name in ("one", "other")]
    for store in stores:
        for epoch in (1, 2, 3):
            store.append(make_trajectory(epoch, steps=100))
        store.close()
    one, other = ((store.path / "trajectories" / "000001-000003.h5").read_bytes() for store in stores)
    assert one == other


def test_run_json_accepts_numpy_numbers_and_rejects_objects(tmp_path):
    environment = Gridworld(num_envs=np.int64(2), seed=0)
    agent = QLearning(environment.single_observation_space, environment.single_action_space, seed=0)
    store = HDF5Store(tmp_path / "run")
    rein.train(agent, environment, store, epochs=1, iterations=3)
    store.close()
    assert open_run(store.path).info["parts"]["environment"]["config"]["num_envs"] == 2
    with pytest.raises(TypeError, match=r"object .* cannot be written to run\.json"):
        HDF5Store(tmp_path / "other").write_run({"config": object()})


def test_epoch_without_rows_is_kept_beyond_max_bytes(tmp_path):
    whole = make_trajectory(2)
    empty = map_tree(lambda column: column[:0], {"fields": whole.fields, "episodes": whole.episodes})
    store = HDF5Store(tmp_path / "run", max_bytes=1)
    given = [make_trajectory(1), whole._replace(**empty), make_trajectory(3)]
    for trajectory in given:
        store.append(trajectory)
    store.close()
    assert_equal(read(store.path), given)


def test_repr_has_folder_files_and_size(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with contextlib.closing(HDF5Store("run")) as store:
        assert repr(store) == "HDF5Store('run', 0 files, 0.0 MiB)"
        store.append(make_trajectory(1))
        store.flush()
        assert "1 files" in repr(store)
