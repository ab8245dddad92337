"""Sequences that are padded at the ends of episodes, compared with an independent record."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from rein.ops.trees import leaves
from rein.store import datasets as datasets_module
from rein.store.reader import open_run
from rein.testing.store import make_trajectory
from tests.store.test_datasets import Known, simulate, windows
from tests.store.trajectory_files import write


@pytest.fixture(params=["in memory", "mapped"])
def given(request: Any, monkeypatch: Any, tmp_path: Path) -> tuple[Path, list[Known]]:
    if request.param == "mapped":
        monkeypatch.setattr(datasets_module, "_SMALL", 0)
    trajectories, known = simulate(7, 11)
    return write(tmp_path / "run", trajectories, max_epochs=2), known


@pytest.mark.parametrize(("length", "stride"), [(1, 1), (4, 1), (4, 3), (9, 9), (100, 100)])
def test_padded_sequences_have_the_transitions_and_then_zeros(
    given: tuple[Path, list[Known]], length: int, stride: int
) -> None:
    path, known = given
    sequences, expected = open_run(path).sequences(length, stride, pad=True), windows(known, length, stride, pad=True)
    assert len(sequences) == len(expected)
    order = torch.randperm(len(sequences), generator=torch.manual_seed(0))
    for batch, want in ((sequences[:], expected), (sequences[order], [expected[i] for i in order.tolist()])):
        assert batch.valid.shape == (len(want), length)
        assert batch.valid.sum(1).tolist() == [len(window) for window in want]
        for fields, attribute in ((batch.observation, "observation"), (batch.next_observation, "following")):
            x = fields["x"][..., 0]
            assert x[batch.valid].tolist() == [getattr(k, attribute) for window in want for k in window]
        for _, leaf in leaves(batch._replace(valid=None)):
            assert not leaf[~batch.valid].any()
    assert (length > 1) == bool((~sequences[:].valid).any())


def test_padded_sequences_with_their_length_as_stride_contain_each_transition_once(
    given: tuple[Path, list[Known]],
) -> None:
    path, known = given
    batches = DataLoader(open_run(path).sequences(8, 8, fields=["observation"], pad=True), batch_size=16)
    seen = torch.cat([batch.observation["x"][..., 0][batch.valid] for batch in batches])
    assert sorted(seen.tolist()) == sorted(k.observation for k in known)


@pytest.mark.parametrize("small", [datasets_module._SMALL, 0])
def test_run_shorter_than_the_window_is_padded(tmp_path: Path, monkeypatch: Any, small: int) -> None:
    monkeypatch.setattr(datasets_module, "_SMALL", small)
    trajectory = make_trajectory(1, steps=5)
    run = open_run(write(tmp_path / "run", [trajectory]))
    sequences = run.sequences(50, 50, fields=["reward"], pad=True)
    assert sorted(sequences[:].reward[sequences[:].valid].tolist()) == sorted(run.field("reward").ravel().tolist())


def test_padded_sequences_follow_one_environment_if_num_envs_changes(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(datasets_module, "_SMALL", 0)
    given = [make_trajectory(1), make_trajectory(2, num_envs=5), make_trajectory(3)]
    run = open_run(write(tmp_path / "run", given, max_epochs=1))
    batch = run.sequences(4, 4, fields=["reward"], pad=True)[:]
    rewards = torch.cat([trajectory.fields["reward"].reshape(-1) for trajectory in given])
    assert sorted(batch.reward[batch.valid].tolist()) == sorted(rewards.tolist())
    assert not batch.reward[~batch.valid].any()
