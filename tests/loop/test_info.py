"""The description of a run: git commit and versions."""

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


def git_entry(monkeypatch: pytest.MonkeyPatch, answer: str | Exception) -> Any:
    """Return the git entry of a run if git gives this answer."""

    def run(command: list[str], **_: Any) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return subprocess.CompletedProcess(command, 0, answer)

    monkeypatch.setattr(subprocess, "run", run)
    return run_info(Loop(lambda state: None))["git"]


@pytest.mark.parametrize("changes", ["", CHANGED])
def test_commit_and_whether_files_are_changed(monkeypatch: pytest.MonkeyPatch, changes: str) -> None:
    git = git_entry(monkeypatch, f"# branch.oid {COMMIT}\n{BRANCH}{changes}")
    assert git == {"commit": COMMIT, "changed": bool(changes)}


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
def test_no_git_entry_without_a_commit(monkeypatch: pytest.MonkeyPatch, answer: str | Exception) -> None:
    assert git_entry(monkeypatch, answer) is None


def test_versions_are_the_installed_ones() -> None:
    versions = run_info(Loop(lambda state: None))["versions"]
    for package in ("torch", "numpy", "gymnasium", "h5py", "attrs", "blinker"):
        version, installed = versions[package], importlib.metadata.version(package)
        assert version.partition("+")[0] == installed.partition("+")[0]  # torch's module version includes its build
