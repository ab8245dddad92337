"""Stores keep every n-th epoch or the best epochs, also in resumed runs."""

import math

import numpy as np
import pytest
import torch

import rein
from rein.agents.q_learning import QLearning
from rein.envs.gridworld import Gridworld
from rein.envs.wrappers.time import TimeLimit
from rein.errors import StoreError
from rein.ops.trees import map_tree
from rein.store.compact import compact
from rein.store.folder import list_files
from rein.store.hdf5 import HDF5Store
from rein.store.verify import verify_run
from rein.testing.store import make_trajectory

RETURNS = [3.0, 9.0, -1.0, 9.0, math.nan, 4.0, 12.0, 2.0, 11.0, -5.0]  # of epochs 1 to 10


def append(store, epochs, returns=RETURNS):
    for epoch in epochs:
        metrics = {"episode_return": returns[epoch - 1]}
        store.append(make_trajectory(epoch)._replace(metrics=metrics))


def kept(store):
    return rein.open_run(store.path).epochs["number"].tolist()


def best(count, mode="max"):
    """Return the epochs with the best returns. The oldest epochs win ties."""
    known = [epoch for epoch in range(1, 11) if not math.isnan(RETURNS[epoch - 1])]
    sign = 1 if mode == "min" else -1
    return sorted(sorted(known, key=lambda epoch: (sign * RETURNS[epoch - 1], epoch))[:count])


def test_every_n_th_epoch_is_kept(tmp_path):
    with_gaps = HDF5Store(tmp_path / "run", every=3)
    append(with_gaps, range(1, 11))
    with_gaps.close()
    assert kept(with_gaps) == [3, 6, 9]
    assert [path.name for path in list_files(with_gaps.path / "trajectories")] == ["000003-000009.h5"]


def test_every_zero_keeps_no_epochs(tmp_path):
    store = HDF5Store(tmp_path / "run", every=0)
    append(store, range(1, 11))
    store.close()
    assert list_files(store.path / "trajectories") == []


@pytest.mark.default_cases(every=5)
@pytest.mark.parametrize("mode", ["max", "min"])
@pytest.mark.parametrize("count", [1, 3, 9, 20])
@pytest.mark.parametrize("flushed_after", [(), (2, 4, 7), tuple(range(1, 11))])
def test_best_epochs_are_kept_in_memory_and_in_files(tmp_path, mode, count, flushed_after):
    store = HDF5Store(tmp_path / "run", keep_best=(count, "episode_return", mode))
    for epoch in range(1, 11):
        append(store, [epoch])
        if epoch in flushed_after:
            store.flush()
    store.close()
    assert kept(store) == best(count, mode)
    assert len(list_files(store.path / "trajectories")) == len(best(count, mode))


def test_every_and_keep_best_combine(tmp_path):
    store = HDF5Store(tmp_path / "run", every=2, keep_best=(2, "episode_return", "max"))
    append(store, range(1, 11))
    store.close()
    assert kept(store) == [2, 4]


def test_epochs_without_the_metric_are_not_kept(tmp_path):
    store = HDF5Store(tmp_path / "run", keep_best=(2, "evaluation_return", "max"))
    append(store, range(1, 11))
    store.append(make_trajectory(11)._replace(metrics={"evaluation_return": -3.0}))
    store.close()
    assert kept(store) == [11]


def test_all_parts_of_a_displaced_epoch_are_removed(tmp_path):
    store = HDF5Store(tmp_path / "run", max_bytes=2000, keep_best=(1, "episode_return", "max"))
    append(store, [1])
    store.flush()
    assert len(list_files(store.path / "trajectories")) > 1
    append(store, [2])
    store.close()
    assert kept(store) == [2]
    assert {path.name[:6] for path in list_files(store.path / "trajectories")} == {"000002"}


@pytest.mark.default_cases(every=4)
@pytest.mark.parametrize("at", range(1, 10))
@pytest.mark.parametrize("further", [0, 1, 3])
def test_resumed_run_keeps_the_same_best_epochs(tmp_path, at, further):
    options = {"keep_best": (3, "episode_return", "max")}
    store = HDF5Store(tmp_path / "run", **options)
    append(store, range(1, at + 1))
    state = store.state_dict()
    append(store, range(at + 1, min(at + further, 10) + 1))  # before it was killed
    store.close()
    resumed = HDF5Store(tmp_path / "run", exist="resume", **options)
    resumed.load_state_dict(state)
    append(resumed, range(at + 1, 11))
    resumed.close()
    assert kept(resumed) == best(3)


@pytest.mark.parametrize(
    "arguments",
    [
        {"every": -1},
        {"every": 2.5},
        {"keep_best": (0, "episode_return", "max")},
        {"keep_best": (2.0, "episode_return", "max")},
        {"keep_best": (3, 7, "max")},
        {"keep_best": (3, "episode_return", "largest")},
        {"keep_best": "episode_return"},
    ],
)
def test_invalid_selection_raises(tmp_path, arguments):
    with pytest.raises(ValueError, match=next(iter(arguments))):
        HDF5Store(tmp_path / "run", **arguments)
    assert not (tmp_path / "run").exists()


def test_run_with_gaps_has_no_transitions_across_gaps(tmp_path):
    def train(name, **options):
        environment = Gridworld(4, [(2, 4)], seed=0, max_episode_steps=15)
        agent = QLearning(environment.single_observation_space, environment.single_action_space, seed=0)
        store = HDF5Store(tmp_path / name, **options)
        rein.train(agent, environment, store, epochs=12, iterations=10, seed=0)
        store.close()
        return rein.open_run(store.path)

    everything, some = train("all"), train("some", every=3)
    assert verify_run(some.path).problems == []
    assert some.epochs["number"].tolist() == [3, 6, 9, 12]
    inside = everything.epochs["number"] % 3 == 0
    assert some.field("reward").sum() == sum(
        everything.field("reward", slice(first, first + length)).sum()
        for first, length in zip(
            everything.epochs["first_row"][inside], everything.epochs["length"][inside], strict=True
        )
    )
    steps = some.sequences(8)
    assert len(steps) > 0
    whole = everything.sequences(8)
    known = {tuple(sequence.observation.reshape(-1).tolist()) for sequence in (whole[i] for i in range(len(whole)))}
    assert all(tuple(steps[i].observation.reshape(-1).tolist()) in known for i in range(len(steps)))


def test_displaced_epoch_is_removed_after_its_replacement_is_written(tmp_path, monkeypatch):
    store = HDF5Store(tmp_path / "run", keep_best=(1, "episode_return", "max"))
    append(store, [1])
    store.flush()
    files = []
    remove = store._files._remove
    monkeypatch.setattr(store._files, "_remove", lambda epoch: (files.append(names(store)), remove(epoch)))
    append(store, [2])
    store.close()
    assert files == [["000001-000001.h5", "000002-000002.h5"]]
    assert names(store) == ["000002-000002.h5"]


def names(store):
    return [path.name for path in list_files(store.path / "trajectories")]


def test_other_selection_keeps_old_files_and_starts_over(tmp_path):
    store = HDF5Store(tmp_path / "run", keep_best=(2, "episode_return", "max"))
    append(store, range(1, 6))
    state = store.state_dict()
    store.close()
    for options in ({"keep_best": (2, "episode_return", "min")}, {"keep_best": (2, "another", "max")}):
        resumed = HDF5Store(tmp_path / "run", exist="resume", **options)
        resumed.load_state_dict(state)
        assert kept(resumed) == [2, 4]
        assert resumed.state_dict()["best"][2] == []
        resumed.close()
    plain = {"epoch": 5}
    resumed = HDF5Store(tmp_path / "run", exist="resume", keep_best=(2, "episode_return", "max"))
    resumed.load_state_dict(plain)
    assert kept(resumed) == [2, 4]


SELECTIONS = [{"keep_best": (2, "success", "max")}, {"every": 100}]


@pytest.mark.parametrize("options", SELECTIONS)
def test_store_that_selects_no_epoch_keeps_the_last_one(options, tmp_path, caplog):
    store = HDF5Store(tmp_path / "run", **options)
    for epoch in range(1, 11):
        append(store, [epoch])
        if epoch in (3, 7):
            store.flush()
            assert kept(store) == [epoch]
    store.close()
    assert kept(store) == [10]
    assert caplog.text.count("selected no epoch, so the last one is kept") == 1


@pytest.mark.parametrize("options", [{"keep_best": (2, "episode_return", "max")}, {"every": 8}])
def test_selected_epoch_replaces_the_last_one(options, tmp_path, caplog):
    returns = [math.nan] * 7 + [1.0, math.nan, math.nan]
    store = HDF5Store(tmp_path / "run", **options)
    append(store, range(1, 6), returns)
    state = store.state_dict()
    assert kept(store) == [5]
    append(store, range(6, 8), returns)
    store.close()
    resumed = HDF5Store(tmp_path / "run", exist="resume", **options)
    resumed.load_state_dict(state)
    append(resumed, range(6, 11), returns)
    resumed.close()
    assert kept(resumed) == [8]


def test_run_with_a_misspelled_metric_raises_after_the_first_epoch(tmp_path):
    store = HDF5Store(tmp_path / "run", keep_best=(3, "return", "max"))
    environment = Gridworld(4, [(2, 4)], seed=0, max_episode_steps=9)
    agent = QLearning(environment.single_observation_space, environment.single_action_space, seed=0)
    loop = rein.training_loop(agent, environment, store)
    with pytest.raises(ValueError, match="did you mean 'episode_return'"):
        loop.run(epochs=5, iterations=9)
    assert loop.state.epoch == 1


def test_compacted_run_keeps_best_epochs_in_separate_files(tmp_path):
    store = HDF5Store(tmp_path / "run", keep_best=(2, "episode_return", "max"), max_bytes=2000)
    store.write_run({"parts": {"store": {"config": store.config}}})
    append(store, range(1, 5))
    state = store.state_dict()
    store.close()
    assert len(names(store)) > 2
    compact(store.path, tmp_path / "compacted")
    resumed = HDF5Store(tmp_path / "compacted", exist="resume", keep_best=(2, "episode_return", "max"))
    assert names(resumed) == ["000002-000002.h5", "000004-000004.h5"]
    resumed.load_state_dict(state)
    append(resumed, range(5, 11))
    resumed.close()
    assert kept(resumed) == best(2)


@pytest.mark.default_cases("7-options0", "40-options1", "7-options2")
@pytest.mark.parametrize("options", [{"keep_best": (3, "episode_return", "max")}, {"every": 3}, {}])
@pytest.mark.parametrize("length", [7, 40])
def test_column_whole_marks_readable_episodes(tmp_path, options, length):
    environment = TimeLimit(Gridworld(num_envs=3, seed=0), length)
    agent = QLearning(environment.single_observation_space, environment.single_action_space, seed=0)
    store = HDF5Store(tmp_path / "run", max_epochs=2, **options)
    rein.training_loop(agent, environment, store, seed=0).run(epochs=12, iterations=20)
    store.close()
    run = rein.open_run(store.path)
    whole = dict(zip(run.episodes["id"].tolist(), run.episodes["whole"].tolist(), strict=True))
    assert set(whole.values()) == ({True, False} if options else {True})
    for id, readable in whole.items():
        if readable:
            assert run.episode(id).id == id
        else:
            with pytest.raises(StoreError, match="transitions"):
                run.episode(id)


def test_episode_is_whole_if_gaps_contain_none_of_its_steps(tmp_path):
    """Environment 0 acts only in epochs 1 and 3. Its episode of 5 steps spans epoch 2, which is not kept."""
    store = HDF5Store(tmp_path / "run")
    one = make_trajectory(1)
    rows, num_envs = one.fields["reward"].shape
    for epoch in (1, 3):
        valid = torch.ones(rows, num_envs, dtype=torch.bool)
        valid[2:, 0] = False
        valid[-1, 0] = epoch == 3
        ended = {name: np.array([value]) for name, value in (("id", 0), ("environment", 0), ("seed", 0))}
        ended |= {"first_step": np.array([0]), "last_step": np.array([3 * rows - 1]), "length": np.array([5])}
        ended |= {"episode_return": np.array([1.0])}
        ended |= {"terminated": np.array([True]), "truncated": np.array([False])}
        table = type(one.episodes)(**ended, final_observation=None)
        none = map_tree(lambda column: column[:0], table)
        fields = {"reward": one.fields["reward"], "valid": valid}
        episodes = table if epoch == 3 else none
        at = {"epoch": epoch, "first_step": (epoch - 1) * rows, "next_observation": None}
        store.append(one._replace(**at, fields=fields, episodes=episodes))
    store.close()
    run = rein.open_run(store.path)
    assert run.episodes["whole"].tolist() == [True]
    assert run.episode(0).length == 5
