"""`rein sweep`: spaces, trials, pruning, continuation and the best configuration."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rein.cli import main
from rein.cli.experiment import Experiment
from rein.cli.jobs import Display, Job
from rein.cli.plans import Plan, Space, make_plan

SWEEP = ["sweep", "gridworld", "--epochs", "10", "--param", "learning_rate=log:1e-3..1"]
OPTIONS = {"learning_rate", "hidden", "num_envs", "normalize_observation", "activation", "gae_lambda"}


def check(words: list[str]) -> Plan:
    return make_plan(Experiment("cartpole"), words, None, "sweep")


@pytest.mark.parametrize(
    ("text", "space"),
    [
        ("learning_rate=log:1e-4..1e-2", Space("learning_rate", "log:1e-4..1e-2", "float", 1e-4, 1e-2, True)),
        ("gae-lambda=0..1", Space("gae_lambda", "0..1", "float", 0.0, 1.0, False)),
        ("num_envs=log:8..1e3", Space("num_envs", "log:8..1e3", "int", 8, 1000, True)),
        ("hidden=[32,32]|[64]", Space("hidden", "[32,32]|[64]", "choice", choices=("[32,32]", "[64]"))),
        ("activation=tanh|relu", Space("activation", "tanh|relu", "choice", choices=("tanh", "relu"))),
        (
            "normalize_observation=true|false",
            Space("normalize_observation", "true|false", "choice", choices=("true", "false")),
        ),
    ],
)
def test_param_describes_a_space(text, space):
    assert Space.parse(text, OPTIONS, check) == space


@pytest.mark.parametrize(
    ("text", "keyword"),
    [
        ("learning_rate", "values"),
        ("learning_rate=", "values"),
        ("learning_rat=0..1", "learning_rate"),
        ("learning_rate=1..0", "lower"),
        ("learning_rate=1..1", "lower"),
        ("learning_rate=0..inf", "numbers"),
        ("learning_rate=log:0..1", "above 0"),
        ("learning_rate=a..b", "float"),
        ("learning_rate=0.1|fast", "fast"),
        ("hidden=32..64", "numbers"),
        ("num_envs=1.5..3", "whole number"),
    ],
)
def test_invalid_param_raises(text, keyword):
    with pytest.raises((ValueError, TypeError), match=keyword):
        Space.parse(text, OPTIONS, check)


@pytest.fixture
def scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[int, list[float]]:
    """Scores per trial, one per epoch. A job writes these instead of training, and fails without scores."""
    pytest.importorskip("optuna")
    found: dict[int, list[float]] = {}

    def run_jobs(
        jobs: Iterator[Job],
        at_most: int,
        display: Display,
        *,
        ended: Callable[[Job], None],
        is_hopeless: Callable[[Job], bool],
    ) -> int | None:
        for job in jobs:
            number = int(job.folder.name.removeprefix("trial-"))
            if number not in found:
                job.status = "interrupted"
                ended(job)
                return signal.SIGINT
            job.status = "failed" if not found[number] else "completed"
            for end in (2, len(found[number])) if found[number] else ():
                epochs = np.arange(1, end + 1, dtype=np.float64)
                job.columns = {"epoch": epochs, "env_steps": 100 * epochs}
                job.columns["episode_return_100"] = np.array(found[number][:end])
                if end == 2 and is_hopeless(job):
                    job.status = "pruned"
                    break
            ended(job)
        return None

    monkeypatch.setattr("rein.cli.sweep.run_jobs", run_jobs)
    monkeypatch.chdir(tmp_path)
    return found


def best() -> dict[str, Any]:
    return tomllib.loads(Path("runs/gridworld-sweep/best.toml").read_text())


def test_best_trial_is_written_and_accepted_by_train(scores, capsys):
    scores |= {0: [1.0] * 10, 1: [3.0] * 10, 2: []}
    main([*SWEEP, "--param", "gamma=0.5|0.75", "--trials", "3", "--no-stop-when-solved"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[:3]] == [["trial", "episode_return_100"], ["1", "3"], ["0", "1"]]
    assert "2 completed, 1 failed" in lines[3]
    found = best()
    assert 1e-3 <= found["agent"]["learning_rate"] <= 1.0 and found["agent"]["gamma"] in (0.5, 0.75)
    assert (found["training"]["epochs"], found["training"]["stop_when_solved"]) == (10, False)
    main(["train", "--config", "runs/gridworld-sweep/best.toml", "--epochs", "1", "--num-envs", "2", "--quiet"])


def test_trials_use_the_whole_budget_unless_the_user_decides(scores, monkeypatch):
    words: list[list[str]] = []
    monkeypatch.setattr("rein.cli.sweep.run_jobs", lambda jobs, *_, **__: words.extend(job.words for job in jobs))
    for more in ([], ["--stop-when-solved", "--run", "other"]):
        with pytest.raises(SystemExit):
            main([*SWEEP, "--trials", "1", *more])
    assert ["--no-stop-when-solved" in trial for trial in words] == [True, False]


def test_same_command_continues_with_the_interrupted_trial(scores, capsys):
    scores |= {0: [1.0] * 10}
    with pytest.raises(SystemExit) as ended:
        main([*SWEEP, "--trials", "3"])
    assert ended.value.code == 130
    output = capsys.readouterr().out
    assert "1 completed, 1 interrupted" in output
    assert "continue with: rein sweep gridworld" in output
    scores |= {1: [2.0] * 10, 2: [0.0] * 10}
    main([*SWEEP, "--trials", "3"])
    assert "3 completed, in" in capsys.readouterr().out
    main([*SWEEP, "--trials", "3"])
    assert "3 completed, in" in capsys.readouterr().out


def test_interrupted_trial_keeps_its_values(scores, monkeypatch):
    words: list[list[str]] = []
    monkeypatch.setattr("rein.cli.sweep.run_jobs", lambda jobs, *_, **__: words.append(next(jobs).words))
    for _ in range(2):
        with pytest.raises(SystemExit):
            main(SWEEP)
    assert words[0] == words[1]
    assert "--resume" in words[0]


def test_trial_below_the_median_is_pruned(scores, capsys):
    """A score that is NaN until late is not pruned."""
    scores |= {number: [1.0] * 10 for number in range(5)} | {5: [1.0, 0.0, *[9.0] * 8], 6: [*[np.nan] * 9, 2.0]}
    main([*SWEEP, "--trials", "7"])
    output = capsys.readouterr().out
    assert "6 completed, 1 pruned" in output
    assert "best: trial 6" in output


def test_no_prune_completes_all_trials(scores, monkeypatch):
    given: list[dict[str, object]] = []
    monkeypatch.setattr("rein.cli.sweep.run_jobs", lambda *_, **options: given.append(options))
    for more in ([], ["--no-prune", "--run", "other"]):
        with pytest.raises(SystemExit):
            main([*SWEEP, *more])
    assert [options["is_hopeless"] is not None for options in given] == [True, False]


def test_other_options_in_the_folder_of_a_sweep_raise(scores, capsys):
    scores |= {0: [1.0] * 10}
    main([*SWEEP, "--trials", "1"])
    with pytest.raises(SystemExit):
        main([*SWEEP, "--trials", "1", "--gamma", "0.5"])
    assert "other options: {'gamma': 0.99}, not {'gamma': 0.5}" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["a?b", "a#b", "a%25b", "{x}", "ü b", "a&mode=ro"])
def test_folder_of_a_sweep_may_have_any_name(scores, name, tmp_path, capsys):
    scores |= {0: [1.0] * 10}
    for _ in range(2):
        main([*SWEEP, "--trials", "1", "--run", name])
        assert "1 completed, in" in capsys.readouterr().out
    assert {path.name for path in tmp_path.iterdir()} == {name}
    assert Path(name, "study.db").stat().st_size > 0


@pytest.mark.parametrize("damage", ["cut", "text", "version", "value", "folder"])
def test_damaged_study_is_named(scores, damage, capsys):
    scores |= {0: [1.0] * 10}
    main([*SWEEP, "--trials", "1", "--run", "mine"])
    study = Path("mine/study.db")
    content = study.read_bytes()
    if damage == "cut":
        study.write_bytes(content[: len(content) // 2])
    elif damage == "text":
        study.write_bytes(b"not a database" * 1000)
    elif damage in ("version", "value"):
        change = "alembic_version SET version_num = 'x'" if damage == "version" else "trial_values SET value_type = 'x'"
        with contextlib.closing(sqlite3.connect(study)) as connection, connection:
            connection.execute(f"UPDATE {change}")
    else:
        study.unlink()
        study.mkdir()
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main([*SWEEP, "--trials", "2", "--run", "mine"])
    error = capsys.readouterr().err
    assert (ended.value.code, error.count("\n")) == (1, 1)
    assert "study.db: cannot be read" in error


@pytest.mark.slow
def test_other_metric_is_maximized(scores, capsys):
    scores |= {0: [1.0] * 10, 1: [3.0] * 10}
    main([*SWEEP, "--trials", "2", "--metric", "env_steps"])
    assert "best: trial 0" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main([*SWEEP, "--trials", "1", "--metric", "retrun", "--run", "other"])
    assert "no value of retrun" in capsys.readouterr().out


def test_sweep_without_a_score_sets_the_exit_status(scores, capsys):
    scores |= {0: []}
    with pytest.raises(SystemExit) as ended:
        main([*SWEEP, "--trials", "1"])
    assert ended.value.code == 1
    assert "trial 0 has no score" in capsys.readouterr().out


def test_missing_optuna_is_explained(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(SystemExit):
        main(SWEEP)
    assert "pip install" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_ended_sweep_continues_without_losing_a_trial(number, tmp_path):
    pytest.importorskip("optuna")
    command = [sys.executable, "-m", "rein", "sweep", "gridworld", "--param", "learning_rate=0.1|0.5", "--run", "mine"]
    command += ["--trials", "3", "--jobs", "2", "--epochs", "100"]
    process = subprocess.Popen(command, cwd=tmp_path, start_new_session=True)
    while not (tmp_path / "mine/trial-1/metrics.csv").exists():
        assert process.poll() is None
        time.sleep(0.05)
    os.killpg(process.pid, number)
    assert process.wait() == (130 if number == signal.SIGINT else -number)
    again = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    assert "3 completed, in mine" in again.stdout
    assert sorted(path.name for path in (tmp_path / "mine").glob("trial-*")) == ["trial-0", "trial-1", "trial-2"]
