"""`rein compact RUN NEW`: fewer files, the same data bit for bit, and an unchanged original."""

import inspect
import json
import re

import h5py
import numpy as np
import pytest
import torch

import rein
from rein.agents.q_learning import QLearning
from rein.cli import main
from rein.envs.gridworld import Gridworld
from rein.errors import StoreError
from rein.handlers.checkpoint import checkpoint
from rein.ops.random import stream_seed
from rein.ops.trees import leaves
from rein.store.compact import MAX_BYTES, MAX_EPOCHS, compact
from rein.store.folder import list_files
from rein.store.hdf5 import HDF5Store
from rein.store.reader import open_run
from rein.store.verify import verify_run
from rein.testing.store import make_trajectory, with_fields
from tests import programs

KILLS = 6


def write(path, trajectories, **options):
    store = HDF5Store(path, **{"max_epochs": 1, **options})
    store.write_run({"seed": 0})
    for trajectory in trajectories:
        store.append(trajectory)
    store.close()
    return path


def epochs(count, **options):
    return [make_trajectory(epoch, **options) for epoch in range(1, count + 1)]


def names(path):
    return [file.name for file in list_files(path / "trajectories")]


def bits(path):
    """Return all readable values of a run."""
    run = open_run(path)
    found = {f"{t.epoch} {where}": value for t in run for where, value in leaves(t._asdict())}
    found |= {f"epochs {where}": value for where, value in leaves(run.epochs)}
    found |= {f"episodes {where}": value for where, value in leaves(run.episodes)}
    found |= {f"field {name}": run.field(name) for name in run.fields if "/" not in name}
    return {
        where: (v.dtype.str, v.shape, v.tobytes()) if isinstance(v, np.ndarray) else repr(v)
        for where, v in found.items()
    }


def contents(path):
    """Return the bytes of every file in a folder."""
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def test_files_are_joined_with_the_same_data(tmp_path, capsys):
    path, new = write(tmp_path / "run", epochs(7)), tmp_path / "new"
    before, size = contents(path), sum(file.stat().st_size for file in list_files(path / "trajectories"))
    main(["compact", str(path), str(new)])
    assert names(new) == ["000001-000007.h5"] == [p.name for p in (new / "trajectories").iterdir()]
    assert bits(new) == bits(path)
    assert contents(path) == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["new", "run"]
    assert re.fullmatch(r"trajectories: 7 files of \d\.\d MB, now 1 file of \d\.\d MB\n", capsys.readouterr().out)
    assert list_files(new / "trajectories")[0].stat().st_size < size
    with h5py.File(list_files(new / "trajectories")[0]) as file:
        assert json.loads(file["entry/run/data"][()]) == {"seed": 0}
        assert file["entry"].attrs["default"] == "views/episode_return"


def test_files_are_joined_up_to_a_size(tmp_path):
    path = write(tmp_path / "run", epochs(9, steps=20))
    one = sum(leaf.nbytes for _, leaf in leaves(make_trajectory(1, steps=20)) if hasattr(leaf, "nbytes"))
    done = compact(path, tmp_path / "new", max_bytes=int(3.5 * one))
    assert (done.files_before, done.files) == (9, 3)
    assert bits(tmp_path / "new") == bits(path)


def test_files_are_joined_up_to_a_number_of_epochs(tmp_path):
    path = write(tmp_path / "run", epochs(7))
    assert compact(path, tmp_path / "new", max_epochs=3).files == 3
    assert names(tmp_path / "new") == ["000001-000003.h5", "000004-000006.h5", "000007-000007.h5"]
    assert bits(tmp_path / "new") == bits(path)
    defaults = inspect.signature(HDF5Store).parameters
    assert (defaults["max_bytes"].default, defaults["max_epochs"].default) == (MAX_BYTES, MAX_EPOCHS)


def test_parts_of_an_epoch_are_joined_if_they_fit(tmp_path):
    path = write(tmp_path / "run", epochs(3, steps=40), max_bytes=20_000)
    assert any("part" in name for name in names(path))
    whole = sum(leaf.nbytes for _, leaf in leaves(make_trajectory(1, steps=40)) if hasattr(leaf, "nbytes"))
    compact(path, tmp_path / "half", max_bytes=whole // 2)
    assert any("part" in name for name in names(tmp_path / "half"))
    compact(tmp_path / "half", tmp_path / "new")
    assert names(tmp_path / "new") == ["000001-000003.h5"]
    assert bits(tmp_path / "new") == bits(tmp_path / "half") == bits(path)


def test_epochs_with_different_fields_stay_in_separate_files(tmp_path):
    given = epochs(6)
    for number in (2, 3):
        given[number] = with_fields(given[number], value=torch.ones(6, 3))
    given[4] = given[4]._replace(next_observation=None)
    path = write(tmp_path / "run", given)
    compact(path, tmp_path / "new")
    assert names(tmp_path / "new") == ["000001-000002.h5", "000003-000004.h5", "000005-000005.h5", "000006-000006.h5"]
    assert bits(tmp_path / "new") == bits(path)


def test_other_files_are_copied_except_links_and_aside(tmp_path):
    path = write(tmp_path / "run", epochs(2))
    for name in ("videos/aside", "aside/epoch-000001"):
        (path / name).mkdir(parents=True)
        (path / name / "file").write_text(name)
    (path / "trajectories" / "notes.txt").write_text("mine")
    (path / ".run.json.tmp-999999999").write_text("of a killed process")
    (path / "link").symlink_to(path / "run.json")
    compact(path, tmp_path / "new")
    copied = ["run.json", "trajectories/000001-000002.h5", "trajectories/notes.txt", "videos/aside/file"]
    assert sorted(contents(tmp_path / "new")) == copied
    assert (tmp_path / "new/videos/aside/file").read_text() == "videos/aside"


def train(path, epochs, resume=False):
    environment = Gridworld(num_envs=2, seed=0)
    agent = QLearning(environment.single_observation_space, environment.single_action_space, seed=0)
    store = HDF5Store(path, "resume" if resume else "error", max_epochs=1)
    loop = rein.training_loop(agent, environment, store, seed=0)
    checkpoint(loop, store, every=2)
    if resume:
        rein.resume(loop, path / "checkpoints" / "epoch-000002.h5")
    loop.run(epochs=epochs, iterations=20)
    store.close()


def test_files_end_at_checkpoints_in_any_folder(tmp_path):
    environment = Gridworld(num_envs=2, seed=0)
    agent = QLearning(environment, seed=0)
    loop = rein.training_loop(agent, environment, HDF5Store(tmp_path / "run", max_epochs=1), seed=0)
    checkpoint(loop, rein.Checkpoints(tmp_path / "run" / "mine"), every=3, keep_last=None)
    loop.run(epochs=5, iterations=20)
    loop.parts["store"].close()
    compact(tmp_path / "run", tmp_path / "new")
    assert names(tmp_path / "new") == ["000001-000003.h5", "000004-000005.h5"]


def test_run_cannot_be_resumed_while_it_is_copied(tmp_path, monkeypatch):
    path = write(tmp_path / "run", epochs(2))
    refused = []

    def begin(*arguments):
        with pytest.raises(StoreError, match="writing"):
            HDF5Store(path, "resume")
        refused.append(path)
        return []

    monkeypatch.setattr("rein.store.compact._borders", begin)
    compact(path, tmp_path / "new")
    assert refused
    HDF5Store(path, "resume").close()


def test_compacted_run_resumes_like_the_original(tmp_path):
    train(tmp_path / "run", 6)
    compact(tmp_path / "run", tmp_path / "new")
    assert names(tmp_path / "new") == ["000001-000002.h5", "000003-000004.h5", "000005-000006.h5"]
    for name in ("run", "new"):
        train(tmp_path / name, 8, resume=True)
    run, new = bits(tmp_path / "run"), bits(tmp_path / "new")
    assert open_run(tmp_path / "new").epochs["number"].tolist() == list(range(1, 9))
    assert all(run[where] == new[where] for where in run if "seconds" not in where)
    assert verify_run(tmp_path / "new").problems == []


def test_compacting_a_run_being_written_raises(tmp_path):
    store = HDF5Store(tmp_path / "run", max_epochs=1)
    for trajectory in epochs(3):
        store.append(trajectory)
    store.flush()
    with pytest.raises(StoreError, match="a run is writing to it"):
        compact(store.path, tmp_path / "new")
    assert not (tmp_path / "new").exists()
    store.close()
    assert compact(store.path, tmp_path / "new").files == 1


# Imports once and forks for each kill. The process is killed before its n-th call that changes the disk.
FORK_SERVER = """
import os, signal, sys
from pathlib import Path
from rein.store.compact import compact

left = 0

def count(real):
    def call(*arguments, **options):
        global left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments, **options)
    return call

os.mkdir, os.rename, os.replace, os.fsync, os.write = map(count, (os.mkdir, os.rename, os.replace, os.fsync, os.write))
for moment in map(int, sys.argv[2:]):
    child = os.fork()
    if child == 0:
        left = moment
        compact(sys.argv[1], Path(sys.argv[1]).with_name(f"new-{moment}"))
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def test_killed_compaction_leaves_the_run_unchanged(tmp_path):
    path = tmp_path / "run"
    train(path, 4)
    before, data = contents(path), bits(path)
    moments = np.random.default_rng(stream_seed(0, "compact")).permutation(range(20))[:KILLS].tolist()
    done = programs.run("-c", FORK_SERVER, path, *moments)
    assert done.stdout.split() == ["-9"] * KILLS, done.stderr
    assert contents(path) == before
    left = [entry.name for entry in tmp_path.iterdir() if entry != path]
    assert left and all(name.startswith(".new-") for name in left)
    compact(path, tmp_path / "new")
    assert bits(tmp_path / "new") == data


def test_copy_that_differs_is_removed(tmp_path, monkeypatch):
    path = write(tmp_path / "run", epochs(3))
    real = HDF5Store.append
    wrong = lambda self, given: real(self, given._replace(first_step=given.first_step + 1))  # noqa: E731
    monkeypatch.setattr(HDF5Store, "append", wrong)
    with pytest.raises(StoreError, match="differs from the original"):
        compact(path, tmp_path / "new")
    assert [entry.name for entry in tmp_path.iterdir()] == ["run"]


def test_damaged_file_raises(tmp_path):
    path = write(tmp_path / "run", epochs(4))
    damaged = list_files(path / "trajectories")[2]
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    with pytest.raises(StoreError, match=f"{damaged.name}: is damaged"):
        compact(path, tmp_path / "new")
    assert [entry.name for entry in tmp_path.iterdir()] == ["run"]


def test_epoch_with_a_missing_part_raises(tmp_path):
    path = write(tmp_path / "run", epochs(3, steps=40), max_bytes=20_000)
    [file for file in list_files(path / "trajectories") if file.name.startswith("000002")][-1].unlink()
    with pytest.raises(StoreError, match=r"000002-part-01.h5: is incomplete"):
        compact(path, tmp_path / "new")


def test_new_folder_must_be_empty_and_outside_the_run(tmp_path):
    path = write(tmp_path / "run", epochs(2))
    (tmp_path / "new").mkdir()
    compact(path, tmp_path / "new")
    with pytest.raises(StoreError, match="exists; give the path of a new folder"):
        compact(path, tmp_path / "new")
    with pytest.raises(StoreError, match="exists; give the path of a new folder"):
        compact(path, path)
    with pytest.raises(StoreError, match="is inside"):
        compact(path, path / "new")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(StoreError, match="exists; give the path of a new folder"):
        compact(path, tmp_path / "link")


def test_folder_without_trajectories_raises(tmp_path):
    with pytest.raises(StoreError, match="give the folder of a run"):
        compact(tmp_path, tmp_path / "new")
