"""What a path means where a checkpoint is asked for: a file, a run, its best one, its latest one."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

import rein
from rein.agents.q_learning import QLearning
from rein.envs.gridworld import Gridworld
from rein.errors import CheckpointError
from rein.handlers.checkpoint import checkpoint
from rein.store.loading import find


def make_agent() -> QLearning:
    environment = Gridworld(4, [(2, 4)], seed=0)
    return QLearning(environment.single_observation_space, environment.single_action_space, seed=0)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three epochs whose best one is the second."""
    path = tmp_path_factory.mktemp("runs") / "h"
    store = rein.HDF5Store(path)
    loop = rein.training_loop(make_agent(), Gridworld(4, [(2, 4)], seed=0), store, epochs=3, iterations=5)

    @loop.epoch_ended
    def score(state: rein.State) -> None:
        state.metrics["score"] = {1: 0.0, 2: 2.0, 3: 1.0}[state.epoch]

    checkpoint(loop, store, every=1, keep_best=("score", "max"))
    loop.run()
    store.close()
    return path


@pytest.mark.parametrize(
    ("place", "epoch"),
    [
        ("", 3),
        ("checkpoints", 3),
        ("checkpoints/latest", 3),
        ("checkpoints/best", 2),
        ("checkpoints/epoch-000001.h5", 1),
    ],
)
def test_a_run_its_folders_its_latest_and_a_file_are_loaded(run: Path, place: str, epoch: int) -> None:
    agent = make_agent()
    rein.load(agent, run / place)
    assert agent.env_steps == epoch * 20
    saved = find(run / "checkpoints" / ("best" if epoch == 2 else "") / f"epoch-{epoch:06d}.h5")
    assert torch.equal(agent.table, saved.state["parts"]["agent"]["table"])


@pytest.mark.parametrize("place", ["checkpoints/epoch-000099.h5", "checkpoints/none/epoch-000001.h5"])
def test_what_is_not_there_is_told_with_what_is(run: Path, place: str) -> None:
    with pytest.raises(CheckpointError) as error:
        rein.load(make_agent(), run / place)
    there = "epoch-000001.h5, epoch-000002.h5, epoch-000003.h5, best/epoch-000002.h5"
    assert str(error.value) == f"{run / place}: there is no checkpoint; in {run}/checkpoints there are {there}"


def test_a_folder_without_any_says_so_and_of_many_files_the_newest_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"{tmp_path}: there is no checkpoint there; in {tmp_path} there is none"):
        find(tmp_path)
    for number in range(20):
        (tmp_path / f"epoch-{number:06d}.h5").touch()
    with pytest.raises(CheckpointError, match=r"there are \.\.\., epoch-000014\.h5, .*, epoch-000019\.h5$"):
        find(tmp_path / "epoch-000099.h5")
    with pytest.raises(CheckpointError, match=r"there is no checkpoint that is whole, of \.\.\., epoch-000014\.h5"):
        find(tmp_path)


@pytest.mark.parametrize("place", ["", "checkpoints/best", "checkpoints/epoch-000001.h5"])
def test_a_run_that_has_taken_none_says_so_and_how_and_its_metrics_are_not_taken_for_one(
    place: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = rein.HDF5Store(tmp_path / "run")
    environment = Gridworld(4, [(2, 4)], seed=0)
    loop = rein.training_loop(make_agent(), environment, store, epochs=1, iterations=5)
    loop.run()
    store.close()
    assert (tmp_path / "run/metrics.h5").is_file()
    told = r"there is no checkpoint.*; the run has taken none yet: `checkpoint\(loop, store\)`, attached before it runs"
    for ask in (rein.load_agent, lambda path: rein.resume(loop, path)):
        with pytest.raises(CheckpointError, match=told) as error:
            ask(tmp_path / "run" / place)
        assert "metrics.h5" not in f"{error.value} {caplog.text}"


def test_what_lies_in_a_runs_own_folder_is_found_there_too(tmp_path: Path) -> None:
    store = rein.HDF5Store(tmp_path / "run")
    environment = Gridworld(4, [(2, 4)], seed=0)
    loop = rein.training_loop(make_agent(), environment, store, epochs=2, iterations=5)
    loop.run()
    store.close()
    rein.save(make_agent(), store.path / "final.h5")
    with pytest.raises(CheckpointError, match=r"there is final\.h5: name one of them"):
        find(store.path)
    again = rein.HDF5Store(tmp_path / "other")
    loop = rein.training_loop(make_agent(), Gridworld(4, [(2, 4)], seed=0), again, epochs=2, iterations=5)
    checkpoint(loop, rein.Checkpoints(again.path))
    loop.run()
    again.close()
    assert find(again.path).path.name == "epoch-000002.h5"


def test_what_save_wrote_has_no_newest_and_an_empty_path_is_no_folder(tmp_path: Path) -> None:
    for name in ("a.h5", "b.h5"):
        rein.save(make_agent(), tmp_path / name)
    with pytest.raises(CheckpointError, match=r"is no run's folder; in .* there are a\.h5, b\.h5: name one of them"):
        find(tmp_path)
    with pytest.raises(CheckpointError, match="the path is empty"):
        find("")


def test_of_a_run_the_one_before_a_damaged_one_is_loaded_and_said(run: Path, tmp_path: Path, caplog) -> None:
    (tmp_path / "checkpoints").mkdir()
    for name in ("epoch-000001.h5", "epoch-000002.h5", "latest"):
        (tmp_path / "checkpoints" / name).write_bytes((run / "checkpoints" / name).read_bytes())
    damaged = bytearray((run / "checkpoints/epoch-000003.h5").read_bytes())
    damaged[2000] ^= 1
    (tmp_path / "checkpoints/epoch-000003.h5").write_bytes(damaged)
    for place in ("", "checkpoints/latest"):
        with caplog.at_level(logging.WARNING):
            assert find(tmp_path / place).path.name == "epoch-000002.h5"
        assert "epoch-000003.h5: is damaged" in caplog.text
        caplog.clear()
    with pytest.raises(CheckpointError, match=r"epoch-000003\.h5: is damaged"):  # which was asked for by its name
        find(tmp_path / "checkpoints/epoch-000003.h5")


def test_a_file_that_was_saved_as_latest_is_that_file(tmp_path: Path) -> None:
    saved, agent = make_agent(), make_agent()
    saved.env_steps = 7
    rein.save(saved, tmp_path / "latest")
    rein.load(agent, tmp_path / "latest")
    assert agent.env_steps == 7


def test_resume_takes_the_latest_too_and_names_what_there_is(run: Path) -> None:
    loop = rein.training_loop(make_agent(), Gridworld(4, [(2, 4)], seed=0), epochs=3, iterations=5)
    with pytest.raises(CheckpointError, match=r"there is no checkpoint; in .* there are epoch-000001\.h5"):
        rein.resume(loop, run / "checkpoints/epoch-000099.h5")
    assert rein.resume(loop, run / "checkpoints/latest", strict=False).path.name == "epoch-000003.h5"
    assert loop.state.epoch == 3
