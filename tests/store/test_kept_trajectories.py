"""Read a stored trajectory file of every format since version 2: data/trajectories-format-N.h5.

The file holds two epochs of 20 steps of three Gridworlds with target (2, 4) and episodes of at most six steps. The
reward is minus the Manhattan distance of the next cell to the target, so it identifies the next observation.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import rein
from rein.store.verify import verify_run

FILES = sorted(Path(__file__).with_name("data").glob("trajectories-format-*.h5"))


def test_file_of_the_current_format_exists() -> None:
    assert [path.stem.rpartition("-")[2] for path in FILES] == ["2"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_kept_file_is_read(path: Path, tmp_path: Path) -> None:
    copy = shutil.copy(path, tmp_path / "000001-000002.h5")
    assert verify_run(copy).problems == []
    run = rein.open_run(copy)
    assert run.epochs["number"].tolist() == [1, 2] and run.epochs["length"].tolist() == [20, 20]
    assert run.epochs["clocks"]["env_steps"].tolist() == [60, 120]
    batch = run.transitions()[:]
    following = batch.next_observation.long()
    assert batch.reward.shape == (120,) and batch.valid.all()
    assert torch.equal(batch.reward, -(following[:, :2] - following[:, 2:]).abs().sum(1).float())
    ended = batch.terminated | batch.truncated
    assert len(run.episodes["id"]) == ended.sum() > 0
    assert torch.equal(batch.terminated, batch.reward == 0.0)
    for id, episode_return in zip(run.episodes["id"].tolist(), run.episodes["return"].tolist(), strict=True):
        assert run.episode(id).length <= 6 and run.episode(id).fields["reward"].sum() == episode_return
