"""Tests of export_minari: exported and re-imported arrays are equal, also for episodes that span epochs and files."""

import itertools

import minari
import numpy as np
import pytest
import torch
from gymnasium import spaces

from rein.integrations.minari import MinariData, export_minari, narrowed, whole_episodes
from rein.ops.trees import leaves, map_tree
from rein.store.hdf5 import HDF5Store
from rein.store.reader import open_run
from rein.types import Episodes, Trajectory

OBSERVATION = spaces.Dict(
    {
        "camera": spaces.Box(0, 255, (33, 34, 3), np.uint8),  # Minari would compress this to JPEG
        "pair": spaces.Tuple((spaces.Discrete(5), spaces.Box(-9.0, 9.0, (2,), np.float32))),
    }
)
ACTION = spaces.Box(-1.0, 1.0, (2,), np.float32)
LENGTHS = ((5, 9, 4), (3, 3, 3, 3, 3, 3), (17,))  # lengths of the successive episodes of each environment
STEPS, NUM_ENVS = 7, 3  # steps per epoch; episodes span epochs
EPOCHS = 3
TRUNCATED = 4  # every fourth episode is truncated, the others are terminated


@pytest.fixture(autouse=True)
def datasets(tmp_path, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "datasets"))
    return tmp_path / "datasets"


def observe(random, *lead):
    return {
        "camera": random.integers(0, 256, (*lead, 33, 34, 3), np.uint8),
        "pair": {"0": random.integers(0, 5, lead), "1": random.standard_normal((*lead, 2), np.float32)},
    }


def make_run(valid=None):
    """Yield epochs with episodes of these lengths. `valid` lists invalid rows as (step, environment)."""
    random, total = np.random.default_rng(0), STEPS * EPOCHS
    rows = {
        "observation": observe(random, total, NUM_ENVS),
        "action": random.uniform(-1, 1, (total, NUM_ENVS, 2)).astype(np.float32),
        "reward": random.standard_normal((total, NUM_ENVS), np.float32),
        "terminated": np.zeros((total, NUM_ENVS), bool),
        "truncated": np.zeros((total, NUM_ENVS), bool),
        "valid": np.ones((total, NUM_ENVS), bool),
        "value": random.standard_normal((total, NUM_ENVS), np.float32),
        "count": random.integers(0, 9, (total, NUM_ENVS)),
    }
    ended = []
    for n, lengths in enumerate(LENGTHS):
        for first, stop in itertools.pairwise(itertools.accumulate(lengths, initial=0)):
            ended.append((stop - 1, n, first))
    table = []
    for id, (last, n, first) in enumerate(sorted(ended)):
        truncated = id % TRUNCATED == 0
        rows["truncated" if truncated else "terminated"][last, n] = True
        table.append((id, n, first, last, 50 + id if id % 2 else -1, 0.0, last - first + 1, not truncated, truncated))
    for step, n in valid or ():
        rows["valid"][step, n] = False
    finals = observe(random, len(table))
    for epoch in range(1, EPOCHS + 1):
        first = (epoch - 1) * STEPS
        chosen = [row for row in table if first <= row[3] < first + STEPS]
        index = [row[0] for row in chosen]
        kinds = [np.int64] * 5 + [np.float64, np.int64, bool, bool]
        columns = [np.array([row[i] for row in chosen], kind) for i, kind in enumerate(kinds)]
        episodes = Episodes(*columns, map_tree(lambda leaf, i=index: leaf[i], finals))
        fields = map_tree(lambda leaf, a=first: torch.from_numpy(leaf[a : a + STEPS].copy()), rows)
        following = observe(random, NUM_ENVS)
        yield Trajectory(epoch, "completed", first, fields, following, episodes, {}, {})


@pytest.fixture
def run(tmp_path):
    store = HDF5Store(tmp_path / "run", max_epochs=1)
    for trajectory in make_run():
        store.append(trajectory)
    store.close()
    return open_run(store.path)


def same(one, other):
    a, b = (dict(leaves(tree)) for tree in (one, other))
    return a.keys() == b.keys() and all((a[p].dtype, a[p].tobytes()) == (b[p].dtype, b[p].tobytes()) for p in a)


def as_rein(values):
    """Convert nested values of Minari to the structure of rein."""
    if isinstance(values, tuple):
        return {str(place): as_rein(value) for place, value in enumerate(values)}
    return {key: as_rein(value) for key, value in values.items()} if isinstance(values, dict) else values


def test_old_minari_raises_with_the_required_version(monkeypatch):
    monkeypatch.setattr(minari, "create_dataset_from_buffers", lambda dataset_id, buffers: None)
    with pytest.raises(ImportError, match=r"0\.5\.4 or newer"):
        export_minari(make_run(), "rein/test-v0", OBSERVATION, ACTION)


def test_reference_scores_need_an_environment(run):
    with pytest.raises(ValueError, match=r"ref_max_score=\.\.\.: .* give environment="):
        export_minari(run, "all/kinds-v0", OBSERVATION, ACTION, ref_max_score=1.0)


def test_exported_arrays_are_equal_bit_for_bit(run):
    export_minari(run, "all/kinds-v0", OBSERVATION, ACTION)
    dataset = minari.load_dataset("all/kinds-v0")
    ids = run.episodes["id"].tolist()
    assert dataset.total_episodes == len(ids) == sum(map(len, LENGTHS))
    for exported, id in zip(dataset.iterate_episodes(), ids, strict=True):
        mine = run.episode(id)
        observations = as_rein(exported.observations)
        final = map_tree(lambda leaf: np.asarray(leaf[-1]), observations)
        assert same(map_tree(lambda leaf: leaf[:-1], observations), mine.fields["observation"])
        assert same(final, map_tree(np.asarray, mine.final_observation))
        assert same(exported.actions, mine.fields["action"])
        assert same(exported.rewards, mine.fields["reward"])
        assert same(exported.terminations, mine.fields["terminated"])
        assert same(exported.truncations, mine.fields["truncated"])
        for name in ("value", "count"):
            assert same(exported.infos[name][:-1], mine.fields[name])
        assert np.isnan(exported.infos["value"][-1])
        assert exported.infos["count"][-1] == 0
        assert exported.infos.keys() == {"value", "count"}


def test_known_seeds_are_exported(run):
    dataset = export_minari(run, "all/kinds-v0", OBSERVATION, ACTION)
    seeds = [known.get("seed", -1) for known in dataset.storage.get_episode_metadata(dataset.episode_indices)]
    assert seeds == run.episodes["seed"].tolist()
    assert {-1} < set(seeds)


def test_imported_transitions_equal_the_exported_ones(run):
    export_minari(run, "all/kinds-v0", OBSERVATION, ACTION)
    (found,) = MinariData("all/kinds-v0").chunks()
    whole = [run.episode(id) for id in run.episodes["id"].tolist()]
    joined = map_tree(lambda *columns: np.concatenate(columns), *(episode.fields for episode in whole))
    for name in ("observation", "action", "reward", "terminated", "truncated"):
        assert same(map_tree(torch.Tensor.numpy, getattr(found, name)), joined[name]), name
    assert found.truncated.sum() == sum(episode.truncated for episode in whole) > 0
    last = np.cumsum([episode.length for episode in whole]) - 1
    finals = map_tree(lambda *values: np.stack(values), *(episode.final_observation for episode in whole))
    assert same(map_tree(lambda column: column.numpy()[last], found.next_observation), finals)
    inside = np.setdiff1d(np.arange(len(found.reward)), last)
    assert same(
        map_tree(lambda column: column.numpy()[inside], found.next_observation),
        map_tree(lambda column: column[inside + 1], joined["observation"]),
    )


def test_invalid_rows_are_left_out(tmp_path):
    run = list(make_run(valid=[(2, 0), (8, 2)]))
    shorter = {(0, 0): 4, (2, 0): 16}  # environment and first step of the episodes with invalid rows
    for number, trajectory in enumerate(run):
        table = trajectory.episodes
        starts = zip(table.environment.tolist(), table.first_step.tolist(), strict=True)
        length = [shorter.get(start, old) for start, old in zip(starts, table.length.tolist(), strict=True)]
        fields = map_tree(torch.Tensor.numpy, trajectory.fields)
        run[number] = trajectory._replace(fields=fields, episodes=table._replace(length=np.array(length)))
    whole = list(whole_episodes(run))
    assert len(whole) == sum(map(len, LENGTHS))
    assert sorted(len(episode.fields["reward"]) for episode in whole) == sorted([4, 9, 4, *[3] * 6, 16])
    assert all(episode.fields["valid"].all() for episode in whole)


def test_incomplete_episodes_are_left_out(run):
    last = whole_episodes(t for t in run if t.epoch > 1)
    begun_later = [run.episode(id) for id in run.episodes["id"] if run.episode(id).first_step >= STEPS]
    for one, other in zip(last, begun_later, strict=True):
        assert same(one.fields, other.fields)
    first = len(list(whole_episodes(t for t in run if t.epoch == 1)))
    assert first == (run.episodes["epoch"] == 1).sum()


def test_spaces_have_the_dtypes_of_the_data():
    bounds = np.array([-np.inf, -1e300]), np.array([np.inf, 1e300])
    space = spaces.Dict({"x": spaces.Box(*bounds, dtype=np.float64), "n": spaces.Box(0, 65535, (2,), np.uint16)})
    found = narrowed(space)
    assert found["x"].dtype == np.float32
    assert found["x"].low[0] == -np.inf and np.isfinite(found["x"].high[1])
    assert found["n"].dtype == np.int32 and found["n"].high.tolist() == [65535, 65535]
    assert narrowed(OBSERVATION) == OBSERVATION


@pytest.mark.parametrize(
    ("observation", "action", "text"),
    [
        (spaces.Box(-1.0, 1.0, (4,)), ACTION, "the observation of the trajectories does not fit Box"),
        (OBSERVATION, spaces.Box(-1.0, 1.0, (3,)), "the action of the trajectories does not fit Box"),
        (spaces.Dict({"camera": OBSERVATION["camera"]}), ACTION, "the observation of the trajectories does not fit"),
    ],
)
def test_wrong_spaces_raise_and_leave_no_dataset(run, datasets, observation, action, text):
    with pytest.raises(ValueError, match=text):
        export_minari(run, "all/kinds-v0", observation, action)
    assert not (datasets / "all/kinds-v0").exists()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda fields: {**fields, "more": fields["value"]}, "'more'"),
        (lambda fields: {name: tree for name, tree in fields.items() if name != "value"}, "'value'"),
    ],
)
def test_fields_that_change_within_an_episode_raise(change, text, tmp_path, datasets):
    store = HDF5Store(tmp_path / "run")
    for trajectory in make_run():
        fields = change(trajectory.fields) if trajectory.epoch == 2 else trajectory.fields
        store.append(trajectory._replace(fields=fields))
    store.close()
    with pytest.raises(ValueError, match=f"the fields of an episode change from one epoch to the next: {text}"):
        export_minari(open_run(store.path), "all/kinds-v0", OBSERVATION, ACTION)
    assert not (datasets / "all/kinds-v0").exists()


def test_integers_of_different_dtypes_within_an_episode_are_joined(tmp_path):
    store = HDF5Store(tmp_path / "run")
    for trajectory in make_run():
        kind = torch.int32 if trajectory.epoch == 2 else torch.int64
        store.append(trajectory._replace(fields={**trajectory.fields, "count": trajectory.fields["count"].to(kind)}))
    store.close()
    run = open_run(store.path)
    assert export_minari(run, "all/kinds-v0", OBSERVATION, ACTION).total_episodes == len(run.episodes["id"])


def test_existing_dataset_raises_and_does_not_change(run, datasets):
    export_minari(run, "all/kinds-v0", OBSERVATION, ACTION)
    before = (datasets / "all/kinds-v0/data/main_data.hdf5").read_bytes()
    with pytest.raises(ValueError, match="the dataset exists already"):
        export_minari(run, "all/kinds-v0", OBSERVATION, ACTION)
    assert (datasets / "all/kinds-v0/data/main_data.hdf5").read_bytes() == before


def test_incomplete_trajectories_raise(run, datasets):
    none = [t._replace(episodes=map_tree(lambda column: column[:0], t.episodes)) for t in run]
    with pytest.raises(ValueError, match="no episode has ended"):
        export_minari(none, "all/kinds-v0", OBSERVATION, ACTION)
    for name, text in (("reward", "no field 'reward'"), ("action", "no field 'action'")):
        less = [t._replace(fields={key: tree for key, tree in t.fields.items() if key != name}) for t in run]
        with pytest.raises(ValueError, match=text):
            export_minari(less, "all/kinds-v0", OBSERVATION, ACTION)
    assert not (datasets / "all/kinds-v0").exists()
