"""What is told of the code that a run was made with."""

from __future__ import annotations

import importlib.metadata
import subprocess
from typing import Any

import pytest

from rein.loop import Loop
from rein.loop.info import run_info

COMMIT = "0123456789" * 4
BRANCH = "# branch.head main\n# branch.upstream origin/main\n# branch.ab +1 -0\n"
CHANGED = f"1 .M N... 100644 100644 100644 {COMMIT} {COMMIT} rein/a file.py\n"


def git_says(monkeypatch: pytest.MonkeyPatch, answer: str | Exception) -> Any:
    """What a run tells of git, where git gives that answer."""

    def run(command: list[str], **_: Any) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return subprocess.CompletedProcess(command, 0, answer)

    monkeypatch.setattr(subprocess, "run", run)
    return run_info(Loop(lambda state: None))["git"]


@pytest.mark.parametrize("changes", ["", CHANGED])
def test_the_commit_and_whether_anything_is_changed(monkeypatch: pytest.MonkeyPatch, changes: str) -> None:
    told = git_says(monkeypatch, f"# branch.oid {COMMIT}\n{BRANCH}{changes}")
    assert told == {"commit": COMMIT, "changed": bool(changes)}


@pytest.mark.parametrize(
    "answer",
    [
        f"# branch.oid (initial)\n{BRANCH}",
        FileNotFoundError("git"),
        subprocess.CalledProcessError(128, "git"),
        subprocess.TimeoutExpired("git", 10),
    ],
    ids=["no commit yet", "no git", "no repository", "a slow disk"],
)
def test_nothing_where_there_is_no_commit(monkeypatch: pytest.MonkeyPatch, answer: str | Exception) -> None:
    assert git_says(monkeypatch, answer) is None


def test_versions_are_those_that_are_installed() -> None:
    versions = run_info(Loop(lambda state: None))["versions"]
    for package in ("torch", "numpy", "gymnasium", "h5py", "attrs", "blinker"):
        said, installed = versions[package], importlib.metadata.version(package)
        assert said.partition("+")[0] == installed.partition("+")[0]  # torch's module adds what it is built for
