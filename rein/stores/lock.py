"""Who may change the files of a run: many processes that add to it, or one alone that rearranges it."""

from __future__ import annotations

import errno
import importlib
import os
import weakref
from pathlib import Path
from typing import Any

from rein.errors import StoreError

fcntl: Any = importlib.import_module("fcntl") if os.name == "posix" else None

_TAKEN = (errno.EWOULDBLOCK, errno.EACCES)


class Lock:
    """A lock on the folder of a run, which leaves no file there and ends with the process, however that ends.

    Stores share it; with `alone` nobody else may have it. Windows has no such lock, and does without, as does a writer
    on a file system that has none. Raises StoreError where somebody else's forbids it.
    """

    def __init__(self, folder: Path, alone: bool = False) -> None:
        self._pid = os.getpid()
        if fcntl is None:
            return
        try:
            descriptor = os.open(folder, os.O_RDONLY)
        except OSError as error:
            raise StoreError(f"{folder}: cannot be opened: {error.strerror}") from error
        self._descriptor = descriptor
        self._closed = weakref.finalize(self, os.close, descriptor)
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_EX if alone else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except OSError as error:
            if alone or error.errno in _TAKEN:
                self._closed()
                raise StoreError(f"{folder}: {_why(error, alone)}") from error

    def release(self) -> None:
        """Let others have it; may be called twice."""
        if fcntl is None or not self._closed.alive:
            return
        if os.getpid() == self._pid:  # a fork has the same lock, and must not take it from its parent
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        self._closed()


def _why(error: OSError, alone: bool) -> str:
    if error.errno not in _TAKEN:
        return f"cannot be locked: {error.strerror}"
    return "a run is writing to it; try again when it has ended" if alone else "is being compacted; try again later"
