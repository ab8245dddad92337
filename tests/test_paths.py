"""Paths are resolved when an object is built, not when its files are written."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

import rein
from rein.agents.q_learning import QLearning
from rein.envs.gridworld import Gridworld
from rein.files import absolute
from rein.handlers.checkpoint import checkpoint
from rein.handlers.loggers.attach import attach
from rein.handlers.loggers.csv import CSVLogger


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """Start in `here`; the test moves to `there`, which must stay empty."""
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    yield tmp_path / "there"
    assert not list((tmp_path / "there").iterdir())


def make(store):
    environment = Gridworld(num_envs=2, seed=0)
    agent = QLearning(environment.single_observation_space, environment.single_action_space, seed=0)
    return rein.training_loop(agent, environment, store, epochs=6, iterations=30)


def test_run_stays_in_its_folder_after_chdir(elsewhere, tmp_path):
    store = rein.HDF5Store("run", max_epochs=1)
    loop = make(store)
    attach(loop, CSVLogger("mine.csv"))
    loop.epoch_ended(once=3)(lambda state: os.chdir(elsewhere))
    checkpoint(loop, store, keep_last=None)
    loop.run()
    store.close()
    run = tmp_path / "here/run"
    assert len(list((run / "trajectories").glob("*.h5"))) == 6
    assert len(list((run / "checkpoints").glob("*.h5"))) == 6
    assert len((run / "metrics.csv").read_text().splitlines()) == 7
    assert len((tmp_path / "here/mine.csv").read_text().splitlines()) == 7


def test_checkpoints_stay_in_relative_folder_after_chdir(elsewhere, tmp_path):
    loop = rein.Loop(lambda state: None, epochs=2, iterations=1)
    loop.epoch_started(once=1)(lambda state: os.chdir(elsewhere))
    checkpoint(loop, rein.Checkpoints("saved"))
    loop.run()
    assert sorted(file.name for file in (tmp_path / "here/saved").glob("*.h5"))[-1] == "epoch-000002.h5"


def test_open_run_is_readable_after_chdir(elsewhere):
    store = rein.HDF5Store("run", max_epochs=1)
    make(store).run()
    store.close()
    run = rein.open_run("run")
    os.chdir(elsewhere)
    assert len(run.epochs["number"]) == 6
    assert np.asarray(run.trajectory(6).fields["reward"]).shape == (30, 2)


def test_video_stays_in_its_folder_after_chdir(elsewhere, tmp_path):
    pytest.importorskip("imageio_ffmpeg")
    from rein.envs.wrappers.record_video import RecordVideo

    class Renders(Gridworld):
        def render(self, index: int = 0) -> np.ndarray:
            return np.zeros((16, 16, 3), np.uint8)

    environment = RecordVideo(Renders(num_envs=1, seed=0), "videos")
    environment.reset()
    os.chdir(elsewhere)
    environment.apply_action(torch.zeros(1, dtype=torch.int64))
    environment.close()
    assert [file.suffix for file in (tmp_path / "here/videos").iterdir()] == [".mp4"]


def test_home_directory_is_expanded(elsewhere, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert absolute("~/runs") == tmp_path / "home/runs"
    rein.HDF5Store("~/run").close()
    rein.save(make(rein.MemoryStore()).parts["agent"], "~/agent.h5")
    rows = CSVLogger("~/rows.csv")
    rows.append({"a": 1.0})
    rows.close()
    assert {path.name for path in (tmp_path / "home").iterdir()} == {"run", "agent.h5", "rows.csv"}
    assert rein.load_agent("~/agent.h5").config["gamma"] == 0.99
    assert not list((tmp_path / "here").iterdir())
