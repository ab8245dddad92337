"""File system paths given by users."""

from __future__ import annotations

import os
from pathlib import Path


def absolute(path: str | os.PathLike[str]) -> Path:
    """Return the absolute form of `path`, with `~` expanded.

    Objects that keep a path call this when they are built, so that a later `os.chdir` does not move their files.
    Symbolic links and `..` stay as they are.
    """
    return Path(path).expanduser().absolute()


def short(path: Path) -> Path:
    """Return `path` relative to the current directory if it lies there, for messages."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
