"""Export to Minari: properties of exported and re-imported arrays, which are equal bit for bit, and wrong uses."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from typing import Any

import minari
import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st

from rein.errors import StoreError
from rein.integrations.minari import MinariData, export_minari, narrowed, whole_episodes
from rein.ops.trees import leaves, map_tree
from rein.spaces.conversion import layout
from rein.store.hdf5 import HDF5Store
from rein.store.reader import Run, open_run
from rein.types import Episodes, Trajectory

BOUNDS = {
    "float32": (-np.inf, np.inf),
    "float64": (-9.0, np.inf),
    "uint8": (0, 255),
    "int16": (-7, 7),
    "uint16": (0, 9),
}
BOXES = [spaces.Box(low, high, (3,), np.dtype(kind).type) for kind, (low, high) in BOUNDS.items()]
BOXES += [spaces.Box(0, 255, (33, 34, 3), np.uint8), spaces.Box(0, 255, (4, 32, 32), np.uint8)]  # JPEGs to Minari
BOXES += [spaces.Box(-1.0, 1.0, ()), spaces.Box(0.0, 1.0, (2, 1, 3))]
PLAIN = [spaces.Discrete(5), spaces.Discrete(4, start=-2), spaces.MultiDiscrete([3, 2]), spaces.MultiBinary((2, 3))]
NAMES = st.sampled_from(["left eye", "50%b", "é", "x.y", "0", "valid", "%2F"])
SPACES = st.recursive(
    st.sampled_from(BOXES + PLAIN),
    lambda inner: st.one_of(
        st.dictionaries(NAMES, inner, min_size=1, max_size=3).map(spaces.Dict),
        st.lists(inner, min_size=1, max_size=3).map(spaces.Tuple),
    ),
    max_leaves=3,
)


@st.composite
def shapes(draw: Any) -> dict[str, Any]:
    """Draw the layout of a run: epochs, environments, and files of the store."""
    return {
        "epochs": draw(st.lists(st.integers(0, 12), min_size=1, max_size=4)),  # steps per epoch
        "num_envs": draw(st.integers(1, 4)),
        "mean_length": draw(st.integers(1, 9)),  # steps per episode
        "gap": draw(st.sampled_from([0, 1, 3])),  # invalid rows after an episode
        "holes": draw(st.sampled_from([0.0, 0.3])),  # fraction of invalid rows; the last row is valid
        "later": draw(st.booleans()),  # whether the first epoch is missing
        "store": draw(st.sampled_from([{}, {"max_epochs": 1}, {"max_bytes": 1500}, {"max_epochs": 2}])),
    }


def values(random: np.random.Generator, space: spaces.Space[Any], *lead: int) -> Any:
    """Return random values of a space in the structure of rein. Floats may be NaN or infinite."""
    if isinstance(space, spaces.Dict):
        return {key: values(random, child, *lead) for key, child in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return {str(place): values(random, child, *lead) for place, child in enumerate(space.spaces)}
    shape, dtype = layout(space)
    if dtype.kind == "f":
        odd = random.choice([-0.0, np.nan, np.inf, 1e-42], (*lead, *shape))
        return np.where(random.random((*lead, *shape)) < 0.1, odd, random.standard_normal((*lead, *shape))).astype(
            dtype
        )
    low = getattr(space, "start", getattr(space, "low", 0))
    high = low + space.n if isinstance(space, spaces.Discrete) else getattr(space, "nvec", None)
    high = getattr(space, "high", np.ones(shape, int)).astype(int) + 1 if high is None else high
    return random.integers(low, high, (*lead, *shape)).astype(dtype)


def ends(random: np.random.Generator, total: int, how: dict[str, Any]) -> tuple[np.ndarray, list[list[int]]]:
    """Return the valid rows, and the last step, environment, first step and length of each completed episode."""
    valid, ended = np.ones((total, how["num_envs"]), bool), []
    for n in range(how["num_envs"]):
        first = 0
        while (stop := first + int(random.geometric(1 / how["mean_length"]))) <= total:
            valid[first : stop - 1, n] = random.random(stop - 1 - first) >= how["holes"]
            ended.append([stop - 1, n, first, int(valid[first:stop, n].sum())])
            first = stop + how["gap"]
            valid[stop:first, n] = False
    return valid, sorted(ended)


def make_run(path: Path, observed: spaces.Space[Any], acted: spaces.Space[Any], how: dict[str, Any]) -> Run:
    """Write a run of random values."""
    random, total = np.random.default_rng(len(how["epochs"])), sum(how["epochs"])
    valid, ended = ends(random, total, how)
    lead = (total, how["num_envs"])
    rows = {
        "observation": values(random, observed, *lead),
        "action": values(random, acted, *lead),
        "reward": random.standard_normal(lead, np.float32),
        **{name: np.zeros(lead, bool) for name in ("terminated", "truncated")},
        "valid": valid,
        "memory": {"carry": random.standard_normal((*lead, 2), np.float32), "on": random.random(lead) < 0.5},
        "count": random.integers(0, 200, lead, np.uint8),
    }
    kinds = random.integers(1, 4, len(ended))  # terminated, truncated, both
    table: Any = np.array(ended, np.int64).reshape(-1, 4).T
    for name, bit in (("terminated", 1), ("truncated", 2)):
        rows[name][table[0], table[1]] = kinds & bit != 0
    finals = values(random, observed, len(ended))
    store, first = HDF5Store(path, **how["store"]), 0
    for number, length in enumerate(how["epochs"], start=1):
        chosen = np.flatnonzero((table[0] >= first) & (table[0] < first + length))
        last, environment, begin, size = table[:, chosen]
        about = (
            np.where(chosen % 3, chosen + 100, -1),
            chosen * 1.0,
            size,
            kinds[chosen] & 1 != 0,
            kinds[chosen] & 2 != 0,
        )
        final = map_tree(lambda leaf, e=chosen: leaf[e], finals)
        episodes = Episodes(chosen, environment, begin, last, *about, final)
        fields = map_tree(lambda leaf, a=first, b=first + length: torch.from_numpy(leaf[a:b].copy()), rows)
        following = values(random, observed, how["num_envs"])
        if number > 1 or not how["later"]:
            store.append(Trajectory(number, "completed", first, fields, following, episodes, {}, {}))
        first += length
    store.close()
    return open_run(path, follow=True)


def same(one: Any, other: Any) -> bool:
    a, b = (dict(leaves(tree)) for tree in (one, other))
    return a.keys() == b.keys() and all(
        (a[p].dtype, a[p].shape, a[p].tobytes()) == (b[p].dtype, b[p].shape, b[p].tobytes()) for p in a
    )


def as_rein(found: Any) -> Any:
    """Convert nested values of Minari to the structure of rein."""
    if isinstance(found, tuple):
        return {str(place): as_rein(part) for place, part in enumerate(found)}
    return {key: as_rein(part) for key, part in found.items()} if isinstance(found, dict) else found


def blank(leaf: np.ndarray) -> bool:
    return bool(np.isnan(leaf).all()) if leaf.dtype.kind == "f" else not leaf.any()


def check_episode(exported: Any, mine: Any) -> None:
    assert exported.observations is not None
    observations = as_rein(exported.observations)
    assert same(map_tree(lambda leaf: leaf[:-1], observations), mine.fields["observation"])
    assert same(map_tree(lambda leaf: np.asarray(leaf[-1]), observations), map_tree(np.asarray, mine.final_observation))
    assert same(as_rein(exported.actions), mine.fields["action"])
    for name, column in (("reward", "rewards"), ("terminated", "terminations"), ("truncated", "truncations")):
        assert same(getattr(exported, column), mine.fields[name])
    assert (bool(exported.terminations[-1]), bool(exported.truncations[-1])) == (mine.terminated, mine.truncated)
    assert exported.infos.keys() == {"memory", "count"}
    assert same(map_tree(lambda leaf: leaf[:-1], exported.infos), {k: mine.fields[k] for k in ("count", "memory")})
    assert all(blank(leaf[-1]) for _, leaf in leaves(exported.infos))


def check_import(name: str, whole: list[Any]) -> None:
    """Assert that `MinariData` returns the transitions of the episodes in order."""
    found = map_tree(lambda *parts: torch.cat(parts).numpy(), *MinariData(name).chunks(20))
    joined = map_tree(lambda *columns: np.concatenate(columns), *(episode.fields for episode in whole))
    for field in ("observation", "action", "reward", "terminated", "truncated"):
        assert same(getattr(found, field), joined[field]), field
    last = np.cumsum([episode.length for episode in whole]) - 1
    finals = map_tree(lambda *rows: np.stack(rows), *(episode.final_observation for episode in whole))
    following = map_tree(lambda leaf: np.roll(leaf, -1, axis=0), joined["observation"])
    for (_, leaf), (_, final) in zip(leaves(following), leaves(finals), strict=True):
        leaf[last] = final
    assert same(found.next_observation, following)


def check(observed: spaces.Space[Any], acted: spaces.Space[Any], how: dict[str, Any]) -> int:
    """Export a run with these spaces, read it back, and return its number of episodes."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("MINARI_DATASETS_PATH", f"{folder}/data")
        run = make_run(Path(folder) / "50%b run", observed, acted, how)
        whole = []
        for id in run.episodes["id"].tolist():
            with contextlib.suppress(*[StoreError] * how["later"]):  # the first transitions are missing
                whole.append(run.episode(id))
        name = "any/run-v0"
        if not whole:
            with pytest.raises(ValueError, match="no episode has ended"):
                export_minari(run, name, observed, acted)
            return 0
        export_minari(run, name, observed, acted)
        dataset = minari.load_dataset(name)
        assert dataset.observation_space == narrowed(observed) and dataset.action_space == narrowed(acted)
        assert dataset.total_steps == sum(episode.length for episode in whole)
        for exported, mine in zip(dataset.iterate_episodes(), whole, strict=True):
            check_episode(exported, mine)
        about = dataset.storage.get_episode_metadata(dataset.episode_indices)
        assert [known.get("seed", -1) for known in about] == [episode.seed for episode in whole]
        check_import(name, whole)
        return len(whole)


CROSSING = {
    "epochs": [9, 0, 7, 12],
    "num_envs": 4,
    "mean_length": 5,
    "gap": 0,
    "holes": 0.0,
    "later": False,
    "store": {},
}
NESTED = spaces.Dict({"a": spaces.Tuple((BOXES[0], spaces.Dict({"50%b": PLAIN[1]}))), "b": BOXES[5]})


@pytest.mark.default_cases(every=2)
@pytest.mark.parametrize("space", [*BOXES, *PLAIN, NESTED], ids=str)
def test_values_of_every_space_round_trip(space: spaces.Space[Any]) -> None:
    assert check(space, space, {**CROSSING, "store": {"max_epochs": 1}}) > 5


@pytest.mark.default_cases("how0", "how1", "how2")
@pytest.mark.parametrize(
    "how",
    [
        {"store": {"max_epochs": 1}, "later": True},  # an episode whose first steps are missing
        {"store": {"max_bytes": 20_000}},  # an epoch in several files
        {"store": {"max_epochs": 2}, "gap": 3},  # invalid rows
        {"store": {"max_epochs": 1}, "gap": 1, "mean_length": 1},
        {"store": {"max_epochs": 3}, "holes": 0.3, "mean_length": 7},
        {"mean_length": 12, "num_envs": 7},
    ],
)
def test_every_file_layout_round_trips(how: dict[str, Any]) -> None:
    assert check(NESTED, BOXES[0], {**CROSSING, **how}) > 3


@settings(max_examples=20)
@given(observed=SPACES, acted=SPACES, how=shapes())
def test_random_spaces_and_layouts_round_trip(
    observed: spaces.Space[Any], acted: spaces.Space[Any], how: dict[str, Any]
) -> None:
    check(observed, acted, how)


OBSERVATION = spaces.Dict({"camera": BOXES[5], "pair": spaces.Tuple((PLAIN[0], spaces.Box(-9.0, 9.0, (2,))))})
ACTION = spaces.Box(-1.0, 1.0, (2,))
NAME = "all/kinds-v0"


@pytest.fixture
def datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "datasets"))
    return tmp_path / "datasets"


@pytest.fixture
def run(tmp_path: Path, datasets: Path) -> Run:
    return make_run(tmp_path / "run", OBSERVATION, ACTION, {**CROSSING, "store": {"max_epochs": 1}})


def test_old_minari_raises_with_the_required_version(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(minari, "create_dataset_from_buffers", lambda dataset_id, buffers: None)
    with pytest.raises(ImportError, match=r"0\.5\.4 or newer"):
        export_minari(run, NAME, OBSERVATION, ACTION)


def test_reference_scores_need_an_environment(run: Run) -> None:
    with pytest.raises(ValueError, match=r"ref_max_score=\.\.\.: .* give environment="):
        export_minari(run, NAME, OBSERVATION, ACTION, ref_max_score=1.0)


def test_incomplete_episodes_are_left_out(run: Run) -> None:
    last = whole_episodes(t for t in run if t.epoch > 1)
    begun_later = [run.episode(id) for id in run.episodes["id"] if run.episode(id).first_step >= CROSSING["epochs"][0]]
    for one, other in zip(last, begun_later, strict=True):
        assert same(one.fields, other.fields)
    first = len(list(whole_episodes(t for t in run if t.epoch == 1)))
    assert first == (run.episodes["epoch"] == 1).sum()


def test_spaces_have_the_dtypes_of_the_data() -> None:
    bounds = np.array([-np.inf, -1e300]), np.array([np.inf, 1e300])
    space = spaces.Dict({"x": spaces.Box(*bounds, dtype=np.float64), "n": spaces.Box(0, 65535, (2,), np.uint16)})
    found: Any = narrowed(space)
    assert found["x"].dtype == np.float32
    assert found["x"].low[0] == -np.inf and np.isfinite(found["x"].high[1])
    assert found["n"].dtype == np.int32 and found["n"].high.tolist() == [65535, 65535]
    assert narrowed(OBSERVATION) == OBSERVATION


@pytest.mark.parametrize(
    ("observation", "action", "text"),
    [
        (spaces.Box(-1.0, 1.0, (4,)), ACTION, "the observation of the trajectories does not fit Box"),
        (OBSERVATION, spaces.Box(-1.0, 1.0, (3,)), "the action of the trajectories does not fit Box"),
        (spaces.Dict({"camera": BOXES[5]}), ACTION, "the observation of the trajectories does not fit"),
    ],
)
def test_wrong_spaces_raise_and_leave_no_dataset(
    run: Run, datasets: Path, observation: Any, action: Any, text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        export_minari(run, NAME, observation, action)
    assert not (datasets / NAME).exists()


def changed(run: Run, path: Path, change: Any) -> Run:
    """Write a copy of a run whose third epoch has other fields."""
    store = HDF5Store(path)
    for trajectory in run:
        fields = map_tree(lambda leaf: torch.from_numpy(np.array(leaf)), trajectory.fields)
        store.append(trajectory._replace(fields=change(fields) if trajectory.epoch == 3 else fields))
    store.close()
    return open_run(path)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda fields: {**fields, "more": fields["count"]}, "'more'"),
        (lambda fields: {name: tree for name, tree in fields.items() if name != "count"}, "'count'"),
    ],
)
def test_fields_that_change_within_an_episode_raise(
    run: Run, change: Any, text: str, tmp_path: Path, datasets: Path
) -> None:
    with pytest.raises(ValueError, match=f"the fields of an episode change from one epoch to the next: {text}"):
        export_minari(changed(run, tmp_path / "changed", change), NAME, OBSERVATION, ACTION)
    assert not (datasets / NAME).exists()


def test_integers_of_different_dtypes_within_an_episode_are_joined(run: Run, tmp_path: Path) -> None:
    other = changed(run, tmp_path / "changed", lambda fields: {**fields, "count": fields["count"].to(torch.int64)})
    assert export_minari(other, NAME, OBSERVATION, ACTION).total_episodes == len(run.episodes["id"])


def test_existing_dataset_raises_and_does_not_change(run: Run, datasets: Path) -> None:
    export_minari(run, NAME, OBSERVATION, ACTION)
    before = (datasets / NAME / "data/main_data.hdf5").read_bytes()
    with pytest.raises(ValueError, match="the dataset exists already"):
        export_minari(run, NAME, OBSERVATION, ACTION)
    assert (datasets / NAME / "data/main_data.hdf5").read_bytes() == before


def test_incomplete_trajectories_raise(run: Run, datasets: Path) -> None:
    none = [t._replace(episodes=map_tree(lambda column: column[:0], t.episodes)) for t in run]
    with pytest.raises(ValueError, match="no episode has ended"):
        export_minari(none, NAME, OBSERVATION, ACTION)
    for name, text in (("reward", "no field 'reward'"), ("action", "no field 'action'")):
        less = [t._replace(fields={key: tree for key, tree in t.fields.items() if key != name}) for t in run]
        with pytest.raises(ValueError, match=text):
            export_minari(less, NAME, OBSERVATION, ACTION)
    assert not (datasets / NAME).exists()
