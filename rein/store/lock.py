"""Who may change the files of a run: one process, whose stores add to it, or a compaction alone that rearranges it."""

from __future__ import annotations

import errno
import importlib
import os
import threading
import weakref
from pathlib import Path
from typing import Any, NamedTuple

from rein.errors import StoreError

fcntl: Any = importlib.import_module("fcntl") if os.name == "posix" else None

_TAKEN = (errno.EWOULDBLOCK, errno.EACCES)


class _Held(NamedTuple):
    """A folder that this process has locked."""

    key: tuple[int, int]  # device and inode
    descriptor: int
    alone: bool
    locked: bool  # False on a file system that has no locks
    locks: set[int]  # that share it


_held: dict[tuple[int, int], _Held] = {}  # by key
_guard = threading.RLock()  # reentrant, for the garbage collector may let go of a lock at any line


class Lock:
    """A lock on the folder of a run, which leaves no file there and ends with the process, however that ends.

    No other process may have it: two that go on with one run would move each other's epochs aside. Stores of one
    process share it, for one may be left behind by a notebook's cell; with `alone` nobody else may have it. Windows has
    no such lock, and does without, as does a writer on a file system that has none. Raises StoreError where somebody
    else's forbids it.
    """

    def __init__(self, folder: Path, alone: bool = False) -> None:
        if fcntl is None:
            return
        with _guard:
            held = None
            while held is None or _held.get(held.key) is not held:  # the garbage collector may let go of it meanwhile
                held = _share(folder, alone)
                try:
                    held.locks.add(id(self))
                    self._release = weakref.finalize(self, _release, held.key, id(self))
                except BaseException:  # an interrupt; raised again
                    _release(held.key, id(self))
                    raise

    def release(self) -> None:
        """Let others have it; may be called twice."""
        if fcntl is not None:
            self._release()


def _share(folder: Path, alone: bool) -> _Held:
    """What this process has of the folder, or now takes."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise StoreError(f"{folder}: cannot be opened: {error.strerror}") from error
    held = None
    try:
        status = os.fstat(descriptor)
        key = status.st_dev, status.st_ino
        held = _held.get(key)
        if held is not None and (alone or held.alone):
            raise StoreError(f"{folder}: {_why(alone)}")
        if held is None:
            locked = _lock(folder, descriptor, alone)
            held = _held[key] = _Held(key, descriptor, alone, locked, set())
        return held
    finally:
        if held is None or held.descriptor != descriptor:
            os.close(descriptor)  # there is one already, or something went wrong


def _lock(folder: Path, descriptor: int, alone: bool) -> bool:
    """Lock the folder. Returns False on a file system without locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if not alone and error.errno not in _TAKEN:
            return False
        why = _why(alone) if error.errno in _TAKEN else f"cannot be locked: {error.strerror}"
        raise StoreError(f"{folder}: {why}") from error
    return True


def _release(key: tuple[int, int], lock: int) -> None:
    with _guard:
        held = _held.get(key)
        if held is None or lock not in held.locks:
            return  # of the process that this one is a fork of
        held.locks.discard(lock)
        if not held.locks:
            del _held[key]
            try:
                if held.locked:  # closing is not enough: a process that is just being started has the descriptor too
                    fcntl.flock(held.descriptor, fcntl.LOCK_UN)
            finally:
                os.close(held.descriptor)


def _why(alone: bool) -> str:
    if alone:
        return "a run is writing to it; try again when it has ended"
    return "another process is writing to it, or compacts it; end that one, or wait, or give the run another folder"


def _forget() -> None:
    """In a fork: the locks are its parent's, and must not outlive that one."""
    for held in _held.values():
        os.close(held.descriptor)
    _held.clear()
    _guard.release()


if fcntl is not None:
    os.register_at_fork(before=_guard.acquire, after_in_parent=_guard.release, after_in_child=_forget)
