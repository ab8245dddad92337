"""Read a stored trajectory file of the current format without rein, with h5py and format.md.

The file holds two epochs of 20 steps of three Gridworlds with target (2, 4) and episodes of at most six steps. The
reward is minus the Manhattan distance of the next cell to the target, so it identifies the next observation.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

FILES = sorted(Path(__file__).with_name("data").glob("trajectories-format-*.h5"))
STEPS, ENVIRONMENTS = 40, 3


@pytest.fixture(params=FILES, ids=lambda path: path.stem)
def path(request: pytest.FixtureRequest) -> Path:
    return request.param


@pytest.fixture
def entry(path: Path) -> Any:
    with h5py.File(path) as file:
        yield file["entry"]


def reward_at(cell: np.ndarray) -> np.ndarray:
    """Return the reward of arriving in cells (..., 4): x, y, target x, target y."""
    cell = cell.astype(np.int64)
    return -np.abs(cell[..., :2] - cell[..., 2:]).sum(-1).astype(np.float32)


def test_file_of_the_current_format_exists() -> None:
    assert [path.stem.rpartition("-")[2] for path in FILES] == ["2"]


def test_user_block_has_length_and_hash(path: Path) -> None:
    data = path.read_bytes()
    magic, length, digest, *_ = data[:512].decode("ascii").splitlines()
    assert magic == "#rein-hdf5 format 2"
    assert length == f"length {len(data) - 512}"
    assert digest == f"sha256 {hashlib.sha256(data[512:]).hexdigest()}"


def test_rows_are_vector_steps(entry: Any) -> None:
    trajectory = entry["trajectory"]
    assert trajectory["observation"].shape == (STEPS, ENVIRONMENTS, 4)
    for name in ("action", "reward", "terminated", "truncated", "valid"):
        assert trajectory[name].shape == (STEPS, ENVIRONMENTS)
    assert trajectory["valid"][()].all()
    assert trajectory["reward"].dtype == np.float32
    assert entry["axes/step"][()].tolist() == list(range(STEPS))
    assert entry["epochs/number"][()].tolist() == [1, 2]
    assert entry["epochs/first_row"][()].tolist() == [0, 20]
    assert entry["epochs/length"][()].tolist() == [20, 20]
    assert entry["epochs/status"][()].tolist() == [b"completed", b"completed"]
    assert entry["epochs/clocks/env_steps"][()].tolist() == [60.0, 120.0]


def test_next_observations_are_found_as_documented(entry: Any) -> None:
    """In the next row, the episode's final observation or the epoch's next one. The reward verifies it."""
    trajectory, episodes = entry["trajectory"], entry["episodes"]
    following = np.empty((STEPS, ENVIRONMENTS, 4), np.int64)
    following[:-1] = trajectory["observation"][1:]
    following[[19, 39]] = entry["epochs/next_observation"][()]
    following[episodes["last_step"][()], episodes["environment"][()]] = episodes["final_observation"][()]
    np.testing.assert_array_equal(reward_at(following), trajectory["reward"][()])


def test_episode_table_matches_the_rows(entry: Any) -> None:
    trajectory, episodes = entry["trajectory"], entry["episodes"]
    reward, ended = trajectory["reward"][()], trajectory["terminated"][()] | trajectory["truncated"][()]
    assert len(episodes["id"]) == ended.sum() > 0
    table = {name: column[()] for name, column in episodes.items() if isinstance(column, h5py.Dataset)}
    for k in range(len(table["id"])):
        first, last, n = (int(table[name][k]) for name in ("first_step", "last_step", "environment"))
        assert table["length"][k] == last - first + 1 <= 6
        assert table["return"][k] == reward[first : last + 1, n].sum()
        assert table["terminated"][k] == (reward[last, n] == 0.0) == trajectory["terminated"][last, n]
        assert ended[last, n] and not ended[first:last, n].any()
        assert table["epoch"][k] == 1 + last // 20


def test_last_line_locates_the_layout(path: Path, entry: Any) -> None:
    data = path.read_bytes()
    name, digits = data[-33:].decode("ascii").split()
    assert (name, len(digits)) == ("#rein-layout", 18)
    end = len(data) - 33
    layout = json.loads(data[end - int(digits) : end])
    assert [*layout] == ["datasets"]
    for name, described in layout["datasets"].items():
        dataset = entry[name]
        assert (described["shape"], described["dtype"]) == ([*dataset.shape], dataset.dtype.str)
        if "offset" in described:
            size = dataset.size * dataset.dtype.itemsize
            assert data[described["offset"] : described["offset"] + size] == dataset[()].tobytes()
        else:
            assert tuple(described["chunk"]) == dataset.chunks and described["filters"] == ["shuffle", "gzip"]
            (offset, length), *_ = described["chunks"]
            assert data[offset : offset + length] == dataset.id.read_direct_chunk((0,) * dataset.ndim)[1]


def test_file_has_a_default_plot_and_run_information(path: Path) -> None:
    with h5py.File(path) as file:
        assert (file.attrs["creator"], file.attrs["rein_format"]) == ("rein", 2)
        view = file[file.attrs["default"]]
        view = view[view.attrs["default"]]
        assert view.attrs["NX_class"] == "NXdata"
        assert view[view.attrs["signal"]].shape == file["entry/episodes/return"].shape
        run = json.loads(file["entry/run/data"][()])
    assert run["parts"]["environment"]["type"] == "rein.envs.gridworld.Gridworld"
    assert run["parts"]["agent"]["config"]["seed"] == 0
