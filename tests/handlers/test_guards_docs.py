"""The Slurm script in `docs/how_to/resume.md` works with replacements of Slurm and rein."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs/how_to/resume.md").read_text(encoding="utf-8")
REIN = """#!/bin/bash
trap 'echo saved >> log; exit 143' TERM
echo "$@" >> log
case $ENDS in "") while :; do sleep 0.05; done ;; *) exit "$ENDS" ;; esac
"""


def submit(folder: Path, ends: str = "") -> subprocess.Popen[bytes]:
    """Start the job in `folder`. `rein` exits with the code `ends`, or runs until SIGTERM if it is empty."""
    (folder / "rein").write_text(REIN)
    (folder / "scontrol").write_text('#!/bin/bash\necho "scontrol $@" >> log\n')
    for program in ("rein", "scontrol"):
        (folder / program).chmod(0o755)
    (found,) = re.findall(r"^```{code-block} sh\n(#!/bin/bash\n.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    environment = os.environ | {"PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "ENDS": ends}
    return subprocess.Popen(["bash", "-c", found], cwd=folder, env=environment)


def test_signal_saves_the_run_and_requeues_the_job(tmp_path: Path) -> None:
    job = submit(tmp_path)
    log = tmp_path / "log"
    while not (log.exists() and log.read_text()):
        time.sleep(0.01)
    job.send_signal(signal.SIGTERM)
    assert job.wait() == 143
    assert log.read_text().splitlines() == [
        "train cartpole --run runs/cartpole --resume --quiet",
        "saved",
        "scontrol requeue 7",
    ]


@pytest.mark.parametrize(("ends", "queued"), [("75", True), ("0", False), ("1", False)])
def test_only_hung_runs_are_requeued(tmp_path: Path, ends: str, queued: bool) -> None:
    assert submit(tmp_path, ends).wait() == int(ends)
    assert ("scontrol requeue 7" in (tmp_path / "log").read_text()) == queued
