"""`rein resume` and `--resume` continue runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import rein
from rein.cli import main
from rein.cli.experiment import Experiment
from rein.cli.plans import Recipe
from rein.store.checkpoint_file import read_checkpoint

TRAIN = ["train", "gridworld", "--quiet", "--no-stop-when-solved"]


@pytest.fixture
def work_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path


def newest(run: str) -> rein.store.checkpoint_file.Checkpoint:
    return read_checkpoint(Path(run, "checkpoints", Path(run, "checkpoints/latest").read_text().strip()))


def same_agent(one: str, other: str) -> bool:
    a, b = (newest(run).state["parts"]["agent"]["table"] for run in (one, other))
    return bool((a == b).all())


def test_resume_extends_a_finished_run_with_its_options(work_folder, capsys):
    main([*TRAIN, "--run", "whole", "--epochs", "9", "--num-envs", "8", "--learning-rate", "0.3"])
    main([*TRAIN, "--run", "mine", "--epochs", "4", "--num-envs", "8", "--learning-rate", "0.3", "--threads", "1"])
    capsys.readouterr()
    main(["resume", "mine", "--epochs", "9", "--quiet"])
    shown = capsys.readouterr().out
    assert shown.startswith("resuming from mine/checkpoints/epoch-000004.h5, after 520 env steps\n")
    assert same_agent("whole", "mine")
    assert rein.open_run("mine").epochs["number"].tolist() == list(range(1, 10))
    options = json.loads(Path("mine/run.json").read_text())["parts"]["recipe"]["config"]["options"]
    assert (options["learning_rate"], options["num_envs"], options["epochs"]) == (0.3, 8, 9)


def test_options_without_json_form_are_not_recorded():
    options = {"a": 1, "sizes": (1, 2), "path": Path("x"), "odd": object(), "several": [1, object()], "none": None}
    config = Recipe(Experiment("name"), options, ["--a", "--a"]).config
    assert config == {
        "name": "name",
        "options": {"a": 1, "sizes": [1, 2], "path": "x", "none": None},
        "given": ["--a"],
    }
    json.dumps(config)


def test_train_with_resume_starts_and_continues(work_folder, capsys):
    for epochs in ("3", "6"):
        main([*TRAIN, "--run", "mine", "--resume", "--epochs", epochs])
    assert "mine has no checkpoint; starting from the beginning\n" in (shown := capsys.readouterr().out)
    assert "resuming from mine/checkpoints/epoch-000003.h5" in shown
    main([*TRAIN, "--run", "whole", "--epochs", "6"])
    assert same_agent("whole", "mine")


def test_changed_configuration_raises_with_the_differences(work_folder, capsys):
    main([*TRAIN, "--run", "mine", "--epochs", "3"])
    with pytest.raises(SystemExit) as ended:
        main(["resume", "mine", "--gamma", "0.5"])
    assert ended.value.code == 1
    assert "agent.config.gamma was 0.99 and is 0.5" in capsys.readouterr().err


def test_folder_without_a_recipe_cannot_be_resumed(work_folder, capsys):
    Path("odd").mkdir()
    Path("odd/run.json").write_text("{}")
    with pytest.raises(SystemExit, match="1"):
        main(["resume", "odd"])
    assert "odd/run.json: does not name the recipe of the run" in capsys.readouterr().err


def test_checkpoint_every_saves_periodically_and_at_the_end(work_folder):
    main([*TRAIN, "--run", "mine", "--epochs", "7", "--checkpoint-every", "3"])
    assert [path.stem for path in sorted(Path("mine/checkpoints").glob("*.h5"))] == [
        "epoch-000003",
        "epoch-000006",
        "epoch-000007",
    ]
    main([*TRAIN, "--run", "none", "--epochs", "3", "--checkpoint-every", "0"])
    assert [path.stem for path in Path("none/checkpoints").glob("*.h5")] == ["epoch-000003"]


@pytest.mark.default_cases("2")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_sets_the_exit_status_and_prints_the_resume_command(work_folder, number):
    command = [sys.executable, "-m", "rein", *TRAIN, "--run", "my run", "--epochs", "100000"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ))
    rows = Path("my run/metrics.csv")
    while (
        not rows.exists() or len(rows.read_bytes().splitlines()) < 2
    ):  # an epoch has ended, so signal handlers are installed
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(number)
    out, error = process.communicate()
    assert process.returncode == 128 + number
    assert out.splitlines()[-1] == "continue with: rein resume 'my run'"
    assert f"rein: {number.name}: the run ends after this iteration and is saved" in error
    at = newest("my run").about["epoch"]
    main(["resume", "my run", "--quiet", "--epochs", str(at + 2)])
    main([*TRAIN, "--run", "whole", "--epochs", str(at + 2)])
    assert same_agent("whole", "my run")


def recipe(run):
    return json.loads(Path(run, "run.json").read_text())["parts"]["recipe"]["config"]


def test_new_limit_replaces_earlier_limits(work_folder, capsys):
    """A parameter of the recipe keeps its value, but no longer ends the run."""
    main([*TRAIN, "--run", "mine", "--epochs", "3", "--num-envs", "8"])
    steps = newest("mine").about["clocks"]["env_steps"]
    main(["resume", "mine", "--quiet", f"--env_steps={3 * steps}"])
    assert f"completed (env_steps has reached {3 * steps}" in capsys.readouterr().out.replace(",", "")
    assert recipe("mine")["options"]["epochs"] == 3 and recipe("mine")["options"]["env_steps"] == 3 * steps
    assert "--epochs" not in recipe("mine")["given"]
    reached = newest("mine").about["epoch"]
    main(["resume", "mine", "--quiet"])  # the new limit still applies
    assert "env_steps has reached" in capsys.readouterr().out
    main(["resume", "mine", "--quiet", "--epochs", str(reached + 2)])
    assert capsys.readouterr().out.splitlines()[1].startswith("completed: ")
    assert newest("mine").about["epoch"] == reached + 2 and recipe("mine")["options"]["env_steps"] is None


def test_limits_given_together_both_apply(work_folder, capsys):
    reached = "completed (env_steps has reached 300)"
    for first, second, end in (("3", "100000", "completed: "), ("100000", "300", reached)):
        main([*TRAIN, "--run", end, "--epochs", first, "--env-steps", second, "--num-envs", "4"])
        main(["resume", end, "--quiet"])
        assert [line for line in capsys.readouterr().out.splitlines() if line.startswith(end)]


def test_error_for_a_damaged_checkpoint_does_not_name_options(tmp_path, capsys):
    run = tmp_path / "run"
    main(["train", "gridworld", "--epochs", "2", "--run", str(run), "--quiet"])
    for file in (run / "checkpoints").glob("*.h5"):
        file.write_bytes(b"damaged")
    with pytest.raises(SystemExit):
        main(["resume", str(run), "--epochs", "3"])
    error = capsys.readouterr().err
    assert "all are damaged" in error
    assert "leave out" not in error


def test_home_folder_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    main(["train", "gridworld", "--epochs", "2", "--run=~/run", "--quiet"])
    main(["resume", "~/run", "--epochs", "3", "--quiet"])
    main(["evaluate", "~/run", "--episodes", "1"])
    assert len(rein.open_run("~/run").epochs["number"]) == 3
