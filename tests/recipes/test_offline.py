"""The offline recipe records data once, learns from it, and outperforms behaviour cloning."""

from __future__ import annotations

from pathlib import Path

import pytest

import rein
from rein.cli import main
from rein.recipes.pendulum_iql import ALGORITHMS, pendulum_iql, record
from rein.testing.stateful import first_difference

SMALL = {"data_env_steps": 40, "epochs": 2, "iterations": 3, "batch_size": 8, "hidden": (8,), "evaluation_episodes": 2}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_missing_data_is_recorded_once(algorithm, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    loop = pendulum_iql(algorithm=algorithm, **SMALL)
    files = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.h5")}
    state = loop.run()
    assert len(loop.parts["agent"].replay) == 40
    assert (state.clocks.updates, state.clocks.env_steps) == (2 * 3 * 5, 0)
    assert "evaluation_return" in state.metrics
    pendulum_iql(algorithm=algorithm, **SMALL)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.h5")} == files
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["pendulum-data"]


def test_missing_data_folder_raises(tmp_path):
    with pytest.raises(rein.errors.StoreError, match="typo"):
        pendulum_iql(data=str(tmp_path / "typo"), **SMALL)
    assert not list(tmp_path.iterdir())


def test_results_depend_only_on_the_seed(tmp_path):
    for seed, folder in ((1, "a"), (1, "b"), (2, "c")):
        record(tmp_path / folder, 40, seed)

    def trained(seed: int, folder: str) -> object:
        loop = pendulum_iql(data=str(tmp_path / folder), seed=seed, **SMALL)
        loop.run()
        return loop.parts["agent"].state_dict()

    assert first_difference(trained(1, "a"), trained(1, "b")) is None
    assert first_difference(trained(1, "a"), trained(2, "c")) is not None


def test_unknown_algorithm_is_rejected_before_recording(tmp_path):
    with pytest.raises(ValueError, match=r"algorithm='cql': use one of iql, awac, bc"):
        pendulum_iql(data=str(tmp_path / "data"), algorithm="cql")
    assert not list(tmp_path.iterdir())


def test_run_from_the_command_line_can_be_resumed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    flags = ["--data-env-steps", "40", "--iterations", "3", "--batch-size", "8", "--hidden", "8", "--quiet"]
    main(["train", "pendulum-iql", *flags, "--evaluation-episodes", "2", "--epochs", "2"])
    assert Path("runs/pendulum-data/trajectories").is_dir()
    run = Path("runs/pendulum-iql")
    assert (run / "metrics.csv").read_text().count("\n") == 3
    main(["resume", str(run), "--epochs", "4", "--quiet"])
    assert (run / "metrics.csv").read_text().count("\n") == 5
    assert "resuming from" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(3))
def test_iql_and_awac_outperform_behaviour_cloning(seed, tmp_path):
    record(tmp_path / "data", 6_000, seed)

    def late_return(algorithm: str) -> float:
        how = {"data": str(tmp_path / "data"), "algorithm": algorithm, "seed": seed, "stop_when_solved": False}
        evaluated: list[float] = []
        loop = pendulum_iql(**how)
        loop.epoch_ended.attach(lambda state: evaluated.append(state.metrics["evaluation_return"]))
        loop.run()
        return sum(evaluated[-5:]) / 5

    imitated = late_return("bc")
    for algorithm in ("iql", "awac"):
        assert late_return(algorithm) > imitated + 100.0
    assert rein.open_run(tmp_path / "data").fields["reward"][1] == (6_000, 1)
