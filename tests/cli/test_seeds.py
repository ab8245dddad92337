"""`rein train --seeds`: one run per seed, a table, and a summary."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import rein
from rein.cli import main
from rein.cli.jobs import Display, Job, parse_seeds

TRAIN = ["train", "gridworld", "--epochs", "2", "--num-envs", "64"]


@pytest.fixture
def work_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder in which jobs run one after another in this process."""

    def run_jobs(jobs: Iterator[Job], at_most: int, display: Display) -> None:
        for job in jobs:
            try:
                main(job.words)
                job.status = "completed"
            except SystemExit:
                job.status = "failed"
            job.refresh()

    monkeypatch.setattr("rein.cli.jobs.run_jobs", run_jobs)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def options_of(run: str) -> dict[str, Any]:
    return json.loads(Path(run, "run.json").read_text())["parts"]["recipe"]["config"]["options"]


@pytest.mark.parametrize(
    ("text", "seeds"), [("3", [3]), ("0-2", [0, 1, 2]), ("5,0,3", [0, 3, 5]), ("0-2,1-3, 9", [0, 1, 2, 3, 9])]
)
def test_seeds_are_ranges_and_numbers(text, seeds):
    assert parse_seeds(text) == seeds


@pytest.mark.parametrize("text", ["", "a", "3-1", "-1", "1.5", "0-", "0-99999999", "0,,1"])
def test_invalid_seeds_raise(text):
    with pytest.raises(ValueError, match="--seeds"):
        parse_seeds(text)


def test_each_seed_has_a_folder_and_a_row(work_folder, capsys):
    main([*TRAIN, "--seeds", "0,3", "--learning-rate", "0.25"])
    assert [options_of(f"runs/gridworld/seed-{seed}")["seed"] for seed in (0, 3)] == [0, 3]
    assert options_of("runs/gridworld/seed-3")["learning_rate"] == 0.25
    shown = capsys.readouterr().out
    assert re.search(r"^seed 3 .* completed", shown, re.MULTILINE)
    scores = [
        rein.open_run(f"runs/gridworld/seed-{seed}").epochs["metrics"]["episode_return_100"][-1] for seed in (0, 3)
    ]
    assert f"interquartile mean {sum(scores) / 2:.5g}" in shown
    assert "plot: rein plot runs/gridworld/seed-*" in shown


def test_run_equals_a_single_run(work_folder):
    main([*TRAIN, "--seeds", "3"])
    main([*TRAIN, "--seed", "3", "--run", "single", "--quiet"])
    several, single = (rein.open_run(path).epochs["metrics"] for path in ("runs/gridworld/seed-3", "single"))
    assert several["episode_return"].tolist() == single["episode_return"].tolist()


def test_second_command_gets_its_own_folder(work_folder):
    for _ in range(2):
        main([*TRAIN, "--seeds", "0"])
    assert sorted(path.name for path in (work_folder / "runs").iterdir()) == ["gridworld", "gridworld-2"]


def test_resume_continues_and_adds_seeds(work_folder):
    main([*TRAIN, "--seeds", "0", "--run", "mine"])
    main([*TRAIN, "--seeds", "0-1", "--run", "mine", "--resume", "--epochs", "3"])
    assert [rein.open_run(f"mine/seed-{seed}").epochs["number"][-1] for seed in (0, 1)] == [3, 3]


def test_options_of_a_file_hold_for_all_seeds(work_folder):
    Path("mine.toml").write_text('recipe = "gridworld"\nagent.gamma = 0.5\n[training]\nepochs = 1\nseed = 7\n')
    main(["train", "--config", "mine.toml", "--seeds", "0-1"])
    found = [options_of(f"runs/gridworld/seed-{seed}") for seed in (0, 1)]
    assert [(options["gamma"], options["epochs"], options["seed"]) for options in found] == [(0.5, 1, 0), (0.5, 1, 1)]


def test_failed_seed_is_named_and_sets_the_exit_status(work_folder, capsys):
    Path("mine/seed-1").mkdir(parents=True)
    Path("mine/seed-1/file").touch()
    Path("mine/seed-0").mkdir()
    with pytest.raises(SystemExit) as ended:
        main([*TRAIN, "--seeds", "0-1", "--run", "mine", "--resume", "--num-envs", "0"])
    assert ended.value.code == 1
    assert "seed 1 failed" in capsys.readouterr().out


@pytest.mark.parametrize("run", ["link", "link/run"])
def test_link_without_a_target_is_named(work_folder, capsys, run):
    (work_folder / "link").symlink_to("missing")
    for words in (["--seeds", "0-1"], []):
        with pytest.raises(SystemExit, match="1"):
            main([*TRAIN, *words, "--run", run])
        assert "link: is a symbolic link to missing" in capsys.readouterr().err


@pytest.mark.slow
def test_interrupted_seeds_are_saved_and_continue(tmp_path):
    command = [sys.executable, "-m", "rein", "train", "gridworld", "--num-envs", "8", "--no-stop-when-solved"]
    several = [*command, "--seeds", "0-1", "--jobs", "2", "--run", "mine"]
    process = subprocess.Popen([*several, "--epochs", "100000"], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    files = [tmp_path / f"mine/seed-{seed}/metrics.csv" for seed in (0, 1)]
    while not all(file.exists() and len(file.read_bytes().splitlines()) > 1 for file in files):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    output = process.communicate()[0]
    assert process.returncode == 130
    assert output.count("interrupted") == 4  # two lines, and two rows of the table
    last = output.splitlines()[-1]
    assert last.startswith("continue with: rein train gridworld")
    assert last.endswith("--seeds 0-1 --run mine --resume")
    epochs = max(int(rein.open_run(file.parent).epochs["number"][-1]) for file in files) + 2
    resumed = subprocess.run([*several, "--epochs", str(epochs), "--resume"], cwd=tmp_path)
    assert resumed.returncode == 0
    whole = [*command, "--seed", "1", "--epochs", str(epochs), "--run", "whole"]
    subprocess.run(whole, cwd=tmp_path, check=True, stdout=subprocess.DEVNULL)
    found, expected = (rein.open_run(tmp_path / name).epochs["metrics"] for name in ("mine/seed-1", "whole"))
    assert found["episode_return"].tolist() == expected["episode_return"].tolist()
