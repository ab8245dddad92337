"""Find a checkpoint by path: a file, a run, its best or its latest checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
    """Run of three epochs, of which the second is the best."""
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
def test_checkpoint_is_found_by_run_folder_and_file(run: Path, place: str, epoch: int) -> None:
    agent = make_agent()
    rein.load(agent, run / place)
    assert agent.env_steps == epoch * 20
    saved = find(run / "checkpoints" / ("best" if epoch == 2 else "") / f"epoch-{epoch:06d}.h5")
    assert torch.equal(agent.table, saved.state["parts"]["agent"]["table"])


@pytest.mark.parametrize("place", ["checkpoints/epoch-000099.h5", "checkpoints/none/epoch-000001.h5"])
def test_missing_checkpoint_lists_the_existing_ones(run: Path, place: str) -> None:
    with pytest.raises(CheckpointError) as error:
        rein.load(make_agent(), run / place)
    files = "epoch-000001.h5, epoch-000002.h5, epoch-000003.h5, best/epoch-000002.h5"
    assert str(error.value) == f"{run / place}: no checkpoint; {run}/checkpoints has {files}"


def test_error_lists_the_newest_files_of_a_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"{tmp_path}: no checkpoint; {tmp_path} has none"):
        find(tmp_path)
    for number in range(20):
        (tmp_path / f"epoch-{number:06d}.h5").touch()
    with pytest.raises(CheckpointError, match=r"has \.\.\., epoch-000014\.h5, .*, epoch-000019\.h5$"):
        find(tmp_path / "epoch-000099.h5")
    with pytest.raises(CheckpointError, match=r"no checkpoint; all are damaged: \.\.\., epoch-000014\.h5"):
        find(tmp_path)


def fail(folder: Path, attach: Callable[[rein.Loop], Any] = lambda loop: None) -> None:
    """Write the folder of a run that fails in its second epoch."""
    store = rein.HDF5Store(folder)
    loop = rein.training_loop(make_agent(), Gridworld(4, [(2, 4)], seed=0), store, epochs=2, iterations=5)
    attach(loop)

    @loop.epoch_started(once=2)
    def stop(state: Any) -> None:
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        loop.run()
    store.close()


@pytest.mark.parametrize("place", ["", "checkpoints/best", "checkpoints/epoch-000001.h5"])
def test_run_without_checkpoints_raises_with_advice(
    place: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fail(tmp_path / "run")
    assert (tmp_path / "run/metrics.h5").is_file()
    message = r"no checkpoint; the run has not ended yet, or it failed; `rein.checkpoint\(loop\)` before the run"
    loop = rein.training_loop(make_agent(), Gridworld(4, [(2, 4)], seed=0))
    for load in (rein.load_agent, lambda path: rein.resume(loop, path)):
        with pytest.raises(CheckpointError, match=message) as error:
            load(tmp_path / "run" / place)
        assert "metrics.h5" not in f"{error.value} {caplog.text}"


def test_checkpoints_directly_in_a_run_folder_are_found(tmp_path: Path) -> None:
    fail(tmp_path / "run")
    rein.save(make_agent(), tmp_path / "run/final.h5")
    with pytest.raises(CheckpointError, match=r"has final\.h5: name one of them"):
        find(tmp_path / "run")
    fail(tmp_path / "other", lambda loop: checkpoint(loop, rein.Checkpoints(tmp_path / "other")))
    assert find(tmp_path / "other").path == tmp_path / "other/epoch-000001.h5"


def test_folder_of_saved_parts_and_empty_path_raise(tmp_path: Path) -> None:
    for name in ("a.h5", "b.h5"):
        rein.save(make_agent(), tmp_path / name)
    with pytest.raises(CheckpointError, match=r"is not the folder of a run; .* has a\.h5, b\.h5: name one of them"):
        find(tmp_path)
    with pytest.raises(CheckpointError, match="the path is empty"):
        find("")


def test_damaged_checkpoint_is_skipped_with_a_warning(run: Path, tmp_path: Path, caplog) -> None:
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
    with pytest.raises(CheckpointError, match=r"epoch-000003\.h5: is damaged"):  # requested by name
        find(tmp_path / "checkpoints/epoch-000003.h5")


def test_part_saved_under_the_name_latest_is_loaded(tmp_path: Path) -> None:
    saved, agent = make_agent(), make_agent()
    saved.env_steps = 7
    rein.save(saved, tmp_path / "latest")
    rein.load(agent, tmp_path / "latest")
    assert agent.env_steps == 7


def test_resume_accepts_latest_and_lists_existing_checkpoints(run: Path) -> None:
    loop = rein.training_loop(make_agent(), Gridworld(4, [(2, 4)], seed=0), epochs=3, iterations=5)
    with pytest.raises(CheckpointError, match=r"no checkpoint; .* has epoch-000001\.h5"):
        rein.resume(loop, run / "checkpoints/epoch-000099.h5")
    assert rein.resume(loop, run / "checkpoints/latest", strict=False).path.name == "epoch-000003.h5"
    assert loop.state.epoch == 3
