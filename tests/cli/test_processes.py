"""Several processes at a time: limits, failures, signals and the death of the parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rein.cli.jobs import Display, Job, Limit, run_jobs

CHILD = """
import os, pathlib, signal, sys, time
folder, task = pathlib.Path(sys.argv[1]), sys.argv[2]
folder.mkdir(exist_ok=True)
rows = ["epoch,status,env_steps,episode_return_100", "1,completed,50,nan", "2,completed,100,7.5", ""]
(folder / "metrics.csv").write_text("\\n".join(rows))
(folder / "threads").write_text(os.environ["OMP_NUM_THREADS"])
if task == "solve":
    print("solved: episode_return_100 7.5")
elif task == "fail":
    sys.exit("rein: it has failed")
elif task == "overlap":  # ends when a second process has started
    while len(list(folder.parent.glob("*/metrics.csv"))) < 2: time.sleep(0.01)
elif task == "wait":
    signal.signal(signal.SIGINT, lambda *_: sys.exit(130))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    (folder / "ready").touch()
    while True: time.sleep(0.01)
"""
COMMAND = (sys.executable, "-S", "-c", CHILD)


def jobs_of(folder: Path, *tasks: str) -> list[Job]:
    folders = [folder / f"{number}-{task}" for number, task in enumerate(tasks)]
    return [Job(path.name, path, [str(path), path.name.partition("-")[2]], Limit("env_steps", 200)) for path in folders]


def run(jobs: list[Job], at_most: int = 2, **options: Callable[..., object]) -> int | None:
    return run_jobs(iter(jobs), at_most, Display(len(jobs), quiet=True), command=COMMAND, **options)  # type: ignore[arg-type]


def test_failed_process_does_not_stop_the_others(tmp_path):
    jobs = jobs_of(tmp_path, "fail", "finish", "solve")
    assert run(jobs) is None
    assert [job.status for job in jobs] == ["failed", "completed", "solved"]
    assert jobs[0].error() == "it has failed"
    assert (jobs[2].env_steps, jobs[2].share, jobs[2].score("episode_return_100")) == (100, 0.5, 7.5)


def test_processes_run_at_the_same_time(tmp_path):
    jobs = jobs_of(tmp_path, "overlap", "overlap")
    run(jobs)
    assert [job.status for job in jobs] == ["completed", "completed"]


def test_processes_are_limited(tmp_path):
    running: list[int] = []
    jobs = jobs_of(tmp_path, "finish", "finish", "finish")
    run(jobs, 1, ended=lambda job: running.append(sum(other.status == "running" for other in jobs)))
    assert running == [0, 0, 0]


def test_cores_are_shared(tmp_path, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("rein.cli.jobs.cores", lambda: 8)
    run(jobs_of(tmp_path, "finish"), 3)
    assert (tmp_path / "0-finish/threads").read_text() == "2"


def test_hopeless_process_is_ended(tmp_path):
    jobs = jobs_of(tmp_path, "wait", "finish")
    run(jobs, is_hopeless=lambda job: (job.folder / "ready").exists())
    assert [job.status for job in jobs] == ["pruned", "completed"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_all_processes(tmp_path, number):
    """Also if the signal is ignored before, as SIGINT is in the background of a shell."""
    jobs = jobs_of(tmp_path, "wait", "wait", "finish")

    def send() -> None:
        while not all((job.folder / "ready").exists() for job in jobs[:2]):
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    previous = signal.signal(number, signal.SIG_IGN)
    try:
        threading.Thread(target=send).start()
        assert run(jobs) == number
    finally:
        signal.signal(number, previous)
    assert [job.status for job in jobs] == ["interrupted", "interrupted", "not started"]
    assert [job.code for job in jobs[:2]] == [128 + number] * 2


def test_error_of_the_parent_ends_all_processes(tmp_path):
    jobs = jobs_of(tmp_path, "wait", "finish")

    def fail(job: Job) -> None:
        raise RuntimeError("a test")

    with pytest.raises(RuntimeError):
        run(jobs, ended=fail)
    assert {job.status for job in jobs} == {"running", "completed"}


def test_display_prints_a_line_for_each_process(tmp_path, capsys):
    jobs = jobs_of(tmp_path, "fail", "finish")
    run_jobs(iter(jobs), 1, Display(2, quiet=False), command=COMMAND)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "0-fail: failed, 100 env steps, episode_return_100 7.5: it has failed"
    assert lines[1].startswith("1-finish: completed")


def test_terminal_shows_bars(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    jobs = jobs_of(tmp_path, "finish")
    run_jobs(iter(jobs), 1, Display(1, quiet=False), command=COMMAND)
    assert "0-finish: completed" in capsys.readouterr().out


@pytest.mark.slow
def test_run_is_saved_when_the_parent_is_killed(tmp_path):
    words = ["train", "gridworld", "--epochs", "100000", "--no-stop-when-solved", "--run", str(tmp_path / "run")]
    program = f"""
import pathlib
from rein.cli.jobs import *
job = Job("x", pathlib.Path({str(tmp_path / "run")!r}), {[*words, "--quiet"]!r})
run_jobs(iter([job]), 1, Display(1, quiet=True))
"""
    parent = subprocess.Popen([sys.executable, "-c", program])
    while not (tmp_path / "run/metrics.csv").exists():
        assert parent.poll() is None
        time.sleep(0.05)
    parent.kill()
    parent.wait()
    while not (tmp_path / "run/checkpoints/latest").exists():
        time.sleep(0.05)
    assert "SIGTERM" in (tmp_path / "logs/run.txt").read_text()
