"""`rein compact`: fewer files, the same run to the bit, and at every moment each epoch once."""

import inspect
import itertools
import json
import os
import re
import subprocess
import sys

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
from rein.store.compact import MAX_EPOCHS, compact
from rein.store.folder import list_files
from rein.store.format import files
from rein.store.hdf5 import HDF5Store
from rein.store.reader import open_run
from rein.testing.store import make_trajectory, with_fields

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
    """All that can be read of a run."""
    run = open_run(path)
    found = {f"{t.epoch} {where}": value for t in run for where, value in leaves(t._asdict())}
    found |= {f"epochs {where}": value for where, value in leaves(run.epochs)}
    found |= {f"episodes {where}": value for where, value in leaves(run.episodes)}
    found |= {f"field {name}": run.field(name) for name in run.fields if "/" not in name}
    return {
        where: (v.dtype.str, v.shape, v.tobytes()) if isinstance(v, np.ndarray) else repr(v)
        for where, v in found.items()
    }


def test_many_files_become_one_and_what_is_read_stays_the_same_to_the_bit(tmp_path, capsys):
    path = write(tmp_path / "run", epochs(7))
    before, size = bits(path), sum(file.stat().st_size for file in list_files(path / "trajectories"))
    main(["compact", str(path)])
    assert names(path) == ["000001-000007.h5"] == [p.name for p in (path / "trajectories").iterdir()]
    assert bits(path) == before
    assert re.fullmatch(r"trajectories: 7 files of \d\.\d MB, now 1 file of \d\.\d MB\n", capsys.readouterr().out)
    assert list_files(path / "trajectories")[0].stat().st_size < size
    assert compact(path).files == 1
    assert bits(path) == before


def test_files_are_joined_up_to_a_size(tmp_path):
    path = write(tmp_path / "run", epochs(9, steps=20))
    before = bits(path)
    one = sum(leaf.nbytes for _, leaf in leaves(make_trajectory(1, steps=20)) if hasattr(leaf, "nbytes"))
    done = compact(path, max_bytes=int(3.5 * one))
    assert (done.files_before, done.files) == (9, 3)
    assert bits(path) == before


def test_files_are_joined_up_to_as_many_epochs_as_a_store_puts_into_one(tmp_path):
    path = write(tmp_path / "run", epochs(7))
    before = bits(path)
    done = compact(path, max_epochs=3)
    assert names(path) == ["000001-000003.h5", "000004-000006.h5", "000007-000007.h5"]
    assert compact(path, max_epochs=3).files == done.files == 3
    assert bits(path) == before
    assert inspect.signature(HDF5Store).parameters["max_epochs"].default == MAX_EPOCHS


def test_the_parts_of_an_epoch_become_one_file_where_they_fit(tmp_path):
    path = write(tmp_path / "run", epochs(3, steps=40), max_bytes=20_000)
    before = bits(path)
    assert any("part" in name for name in names(path))
    whole = sum(leaf.nbytes for _, leaf in leaves(make_trajectory(1, steps=40)) if hasattr(leaf, "nbytes"))
    compact(path, max_bytes=whole // 2)
    assert any("part" in name for name in names(path))  # an epoch stays in parts that is larger than a file may be
    assert bits(path) == before
    compact(path)
    assert names(path) == ["000001-000003.h5"]
    assert bits(path) == before


def test_files_of_other_fields_types_or_configurations_stay_apart(tmp_path):
    given = epochs(8)
    for number in (2, 3):
        given[number] = with_fields(given[number], value=torch.ones(6, 3))
    given[4] = given[4]._replace(next_observation=None)
    store = HDF5Store(tmp_path / "run", max_epochs=1)
    for number, trajectory in enumerate(given):
        store.write_run({"seed": int(number > 5)})
        store.append(trajectory)
        store.flush()
    store.close()
    before = bits(store.path)
    compact(store.path)
    apart = ["000005-000005.h5", "000006-000006.h5"]
    assert names(store.path) == ["000001-000002.h5", "000003-000004.h5", *apart, "000007-000008.h5"]
    assert bits(store.path) == before


def test_a_file_carries_the_run_json_of_those_that_it_replaces(tmp_path):
    path = write(tmp_path / "run", epochs(3))
    (path / "run.json").unlink()
    compact(path)
    with h5py.File(list_files(path / "trajectories")[0]) as file:
        assert json.loads(file["entry/run/data"][()]) == {"seed": 0}
        assert file["entry"].attrs["default"] == "views/episode_return"


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


def test_a_run_resumes_from_any_checkpoint_as_if_nothing_had_been_joined(tmp_path):
    for name in ("whole", "joined"):
        train(tmp_path / name, 6)
    compact(tmp_path / "joined")
    assert names(tmp_path / "joined") == ["000001-000002.h5", "000003-000004.h5", "000005-000006.h5"]
    for name in ("whole", "joined"):
        train(tmp_path / name, 8, resume=True)
    whole, joined = bits(tmp_path / "whole"), bits(tmp_path / "joined")
    assert open_run(tmp_path / "joined").epochs["number"].tolist() == list(range(1, 9))
    timed = [where for where in whole if "seconds" in where]
    assert all(whole[where] == joined[where] for where in whole if where not in timed)


def test_while_a_run_is_writing_it_is_left_alone(tmp_path):
    store = HDF5Store(tmp_path / "run", max_epochs=1)
    for trajectory in epochs(3):
        store.append(trajectory)
    store.flush()
    with pytest.raises(StoreError, match="a run is writing to it"):
        compact(store.path)
    assert len(names(store.path)) == 3
    store.close()
    assert compact(store.path).files == 1


def test_while_it_is_compacted_no_store_opens_it(tmp_path, monkeypatch):
    path, tried = write(tmp_path / "run", epochs(3)), []

    def meanwhile(target, data):
        with pytest.raises(StoreError, match="another process is writing to it, or compacts it"):
            HDF5Store(path, "resume")
        tried.append(files.write_whole(target, data))

    monkeypatch.setattr("rein.store.compact.write_whole", meanwhile)
    compact(path)
    assert len(tried) == 1
    HDF5Store(path, "resume").close()


# Imports once and forks for each kill, which hits before the so-manieth call that changes the disk.
FORK_SERVER = """
import os, signal, sys
from pathlib import Path
from rein.store.compact import MAX_EPOCHS, compact

left = 0

def count(real):
    def call(*arguments, **options):
        global left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments, **options)
    return call

Path.unlink, os.replace, os.fsync, os.write = map(count, (Path.unlink, os.replace, os.fsync, os.write))
for moment in map(int, sys.argv[3:]):
    child = os.fork()
    if child == 0:
        left = moment
        compact(Path(sys.argv[1]) / str(moment), max_bytes=int(sys.argv[2]))
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def test_killed_at_any_point_every_epoch_is_there_once_and_the_next_start_clears_up(tmp_path):
    moments = np.random.default_rng(stream_seed(0, "compact")).permutation(range(1, 18))[:KILLS].tolist()
    before = {moment: bits(write(tmp_path / str(moment), epochs(8))) for moment in moments}
    limit = int(4.5 * sum(leaf.nbytes for _, leaf in leaves(make_trajectory(1)) if hasattr(leaf, "nbytes")))
    command = [sys.executable, "-c", FORK_SERVER, str(tmp_path), str(limit), *map(str, moments)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout.split() == ["-9"] * KILLS, done.stderr
    left_over = 0
    for moment in moments:
        path = tmp_path / str(moment)
        assert bits(path) == before[moment]
        left_over += len(list((path / "trajectories").iterdir())) > len(names(path))
        if moment % 2:
            HDF5Store(path, "resume").close()
            assert sorted(p.name for p in (path / "trajectories").iterdir()) == names(path)
        compact(path, max_bytes=limit)
        assert sorted(p.name for p in (path / "trajectories").iterdir()) == ["000001-000004.h5", "000005-000008.h5"]
        assert bits(path) == before[moment]
    assert left_over > 1


@pytest.mark.parametrize(("steps", "options"), [(6, {}), (40, {"max_bytes": 20_000})], ids=["files", "parts"])
def test_at_every_call_that_changes_the_disk_a_reader_finds_every_epoch_once(tmp_path, monkeypatch, steps, options):
    path = write(tmp_path / "run", epochs(4, steps=steps), **options)
    before, looked, count = bits(path), [], len(names(path))

    def look_before(real):
        def call(*arguments, **options):
            looked.append(bits(path) == before)
            return real(*arguments, **options)

        return call

    monkeypatch.setattr("pathlib.Path.unlink", look_before(type(path).unlink))
    monkeypatch.setattr(os, "replace", look_before(os.replace))
    compact(path)
    assert len(looked) == count + 1 and all(looked)


def test_what_was_not_read_back_as_it_was_is_not_put_in_the_place_of_anything(tmp_path, monkeypatch):
    path = write(tmp_path / "run", epochs(3))
    before = bits(path)
    real = rein.store.compact.write_trajectories

    def wrong(file, given, **options):
        real(file, [given[0]._replace(first_step=given[0].first_step + 1), *given[1:]], **options)

    monkeypatch.setattr("rein.store.compact.write_trajectories", wrong)
    with pytest.raises(StoreError, match="was not read back as it was written"):
        compact(path)
    assert names(path) == ["000001-000001.h5", "000002-000002.h5", "000003-000003.h5"]
    assert bits(path) == before


def test_a_file_replaces_those_only_whose_hashes_it_names(tmp_path):
    path = write(tmp_path / "run", epochs(3))
    kept = list_files(path / "trajectories")[1]
    content = kept.read_bytes()
    compact(path)
    kept.write_bytes(content)  # as a compaction that was killed leaves it
    assert names(path) == ["000001-000003.h5"]
    other = write(tmp_path / "other", epochs(3, seed=1))
    kept.write_bytes(list_files(other / "trajectories")[1].read_bytes())
    assert names(path) == ["000001-000003.h5", kept.name]
    with pytest.raises(StoreError, match="begins with epoch 2 after epoch 3"):
        bits(path)
    HDF5Store(path, "resume").close()
    assert kept.exists()


def test_a_damaged_file_stops_it_before_anything_is_changed(tmp_path):
    path = write(tmp_path / "run", epochs(4))
    damaged = list_files(path / "trajectories")[2]
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    before = {file: file.read_bytes() for file in (path / "trajectories").iterdir()}
    with pytest.raises(StoreError, match=f"{damaged.name}: is damaged"):
        compact(path)
    assert {file: file.read_bytes() for file in (path / "trajectories").iterdir()} == before


def test_a_part_without_the_others_is_left_as_it_is(tmp_path):
    path = write(tmp_path / "run", epochs(3, steps=40), max_bytes=20_000)
    parts = [file for file in list_files(path / "trajectories") if file.name.startswith("000002")]
    parts[-1].unlink()
    compact(path)
    assert names(path) == sorted(["000001-000003.h5", *(file.name for file in parts[:-1])])
    assert open_run(path).epochs["number"].tolist() == [1, 3]


@pytest.mark.parametrize("words", [[], ["--fast"], ["a", "b"]])
def test_it_says_how_it_is_used(words, capsys):
    with pytest.raises(SystemExit):
        main(["compact", *words])
    assert "rein compact RUN" in capsys.readouterr().err


def test_what_is_no_run_is_one_line(tmp_path):
    with pytest.raises(StoreError, match="give the folder of a run"):
        compact(tmp_path)


def test_epochs_that_lie_side_by_side_are_not_looked_into(tmp_path, monkeypatch):
    path = write(tmp_path / "run", epochs(4))
    monkeypatch.setattr("rein.store.replaced._read", lambda path: pytest.fail(f"{path} was opened"))
    assert len(names(path)) == 4
    assert all(a < b for a, b in itertools.pairwise(names(path)))
