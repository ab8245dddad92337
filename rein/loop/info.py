"""Description of a run: versions, command line, configuration and git commit."""

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
    """Return the run as JSON; `parts` holds the configuration of all parts that the loop owns."""
    parts = {
        name: {"type": f"{type(part).__module__}.{type(part).__qualname__}", "config": getattr(part, "config", {})}
        for name, part in loop.parts.items()
    }
    return {
        "versions": {"python": platform.python_version(), **{name: version_of(name) for name in _PACKAGES}},
        "command": sys.argv,
        "threads": torch.get_num_threads(),
        "epochs": loop.state.max_epochs,
        "iterations": loop.state.max_iterations,
        "parts": parts,
        "git": _git_state(),
    }


def version_of(package: str) -> str:
    """Return the version of an imported package, from its module if possible.

    Installed metadata is read only for modules without `__version__`. Returns "unknown" if there is none.
    """
    version = vars(sys.modules[package]).get("__version__") if package in sys.modules else None
    try:
        return importlib.metadata.version(package) if version is None else str(version)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _git_state() -> dict[str, Any] | None:
    """Return the commit of the working directory and whether files are changed; None without a commit."""
    # The configuration of an untrusted repository can name programs that `git status` starts.
    programs = _git("config", "--show-scope", "--get-regexp", r"^filter\..*\.(clean|process)$")
    if any(line.startswith(("local", "worktree")) for line in programs or ()):
        return None
    lines = _git("status", "--porcelain=v2", "--branch", "--untracked-files=no", "--ignore-submodules=dirty")
    if lines is None:
        return None
    changed = [line for line in lines if not line.startswith("#")]
    commit = next(line.split()[-1] for line in lines if line.startswith("# branch.oid"))
    return None if commit == "(initial)" else {"commit": commit, "changed": bool(changed)}


def _git(*words: str) -> list[str] | None:
    """Return the lines that git prints for the working directory; None if it fails."""
    command = ["git", "--no-optional-locks", "-c", "core.fsmonitor=false", "-c", f"core.hooksPath={os.devnull}", *words]
    environment = {**os.environ, "GIT_ALLOW_PROTOCOL": "none", "GIT_NO_LAZY_FETCH": "1"}  # never fetch
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True, env=environment)
        return done.stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return None
