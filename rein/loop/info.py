"""What a run is: versions, command line, configuration and the state of the code."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
from typing import Any

import torch

from rein.loop.loop import Loop

_PACKAGES = ("rein", "torch", "numpy", "gymnasium", "h5py", "attrs", "blinker")


def run_info(loop: Loop) -> dict[str, Any]:
    """The run as JSON; `parts` holds the configuration of everything that the loop owns."""
    parts = {
        name: {"type": f"{type(part).__module__}.{type(part).__qualname__}", "config": getattr(part, "config", {})}
        for name, part in loop.parts.items()
    }
    return {
        "versions": {"python": platform.python_version(), **_versions()},
        "command": sys.argv,
        "threads": torch.get_num_threads(),
        "epochs": loop.state.max_epochs,
        "iterations": loop.state.max_iterations,
        "parts": parts,
        "git": _git_state(),
    }


def _versions() -> dict[str, str]:
    return {name: version_of(name) for name in _PACKAGES}


def version_of(package: str) -> str:
    """Return the version of an imported package, from its module if possible.

    Installed metadata is read only for modules without `__version__`. Returns "unknown" if there is none.
    """
    found = vars(sys.modules[package]).get("__version__") if package in sys.modules else None
    try:
        return importlib.metadata.version(package) if found is None else str(found)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _git_state() -> dict[str, Any] | None:
    """The commit that the working folder stands on and whether anything is changed; None where there is no commit."""
    # A repository's own configuration can name programs that `git status` starts, and it may come from anybody.
    programs = _git("config", "--show-scope", "--get-regexp", r"^filter\..*\.(clean|process)$")
    if any(line.startswith(("local", "worktree")) for line in programs or ()):
        return None
    told = _git("status", "--porcelain=v2", "--branch", "--untracked-files=no", "--ignore-submodules=dirty")
    if told is None:
        return None
    changed = [line for line in told if not line.startswith("#")]
    commit = next(line.split()[-1] for line in told if line.startswith("# branch.oid"))
    return None if commit == "(initial)" else {"commit": commit, "changed": bool(changed)}


def _git(*words: str) -> list[str] | None:
    """Lines that git prints about the working directory; None if it fails."""
    command = ["git", "--no-optional-locks", "-c", "core.fsmonitor=false", "-c", f"core.hooksPath={os.devnull}", *words]
    alone = {**os.environ, "GIT_ALLOW_PROTOCOL": "none", "GIT_NO_LAZY_FETCH": "1"}  # and nothing is fetched
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True, env=alone)
        return done.stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return None
