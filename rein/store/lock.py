"""Lock on the folder of a run, so that only one store writes to it."""

from __future__ import annotations

import contextlib
import errno
import gc
import importlib
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from rein.errors import StoreError

fcntl: Any = importlib.import_module("fcntl") if os.name == "posix" else None

_TAKEN = (errno.EWOULDBLOCK, errno.EACCES)


class _Held(NamedTuple):
    """Folder that this process has locked."""

    key: tuple[int, int]  # device and inode
    descriptor: int
    locked: bool  # False on a file system that has no locks
    lock: weakref.ref[Lock]


_held: dict[tuple[int, int], _Held] = {}  # by key
_guard = threading.RLock()  # reentrant, because the garbage collector may release a lock at any line


class Lock:
    """Lock on the folder of a run. It creates no file and ends with the process.

    Two stores that continue one run would move each other's epochs aside. Windows and some network file systems have no
    such lock; only stores of one process exclude each other on the latter, and none on Windows.

    `give_up` closes the store when another store of this process needs the folder. It is set for a store that is not
    referenced any more, and for one whose run has ended or failed.

    Raises:
        StoreError: a store of this or another process has locked the folder.
    """

    def __init__(self, folder: Path) -> None:
        self.give_up: Callable[[], None] | None = None
        if fcntl is None:
            return
        descriptor, held = _open(folder), None
        try:
            status = os.fstat(descriptor)
            key = status.st_dev, status.st_ino
            _end_unused(key)
            with _guard:
                if key in _held:
                    advice = "call close() of that store first, or use another folder"
                    raise StoreError(f"{folder}: another store of this process is writing to it; {advice}")
                locked = _lock(descriptor)
                if locked is None:
                    advice = "end that process or use another folder"
                    raise StoreError(f"{folder}: another process is writing to it; {advice}")
                _held[key] = held = _Held(key, descriptor, locked, weakref.ref(self))
                self._release = weakref.finalize(self, _release, held)
        except BaseException:  # such as KeyboardInterrupt
            _release(held) if held is not None else os.close(descriptor)
            raise

    def release(self) -> None:
        """Release the lock. A second call does nothing."""
        if fcntl is not None:
            self._release()


def is_locked(folder: Path) -> bool:
    """Return whether a store of this or another process has locked the folder."""
    if fcntl is None:
        return False
    descriptor = _open(folder)
    try:
        if locked := _lock(descriptor):  # also fails if this process holds a lock through another descriptor
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        return locked is None
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def keep_stores_out(folder: Path) -> Iterator[None]:
    """Prevent stores of all processes from opening the folder. Raises StoreError if a store has it open."""
    if fcntl is None:
        yield
        return
    descriptor = _open(folder)
    try:
        locked = _lock(descriptor)
        if locked is None:
            raise StoreError(f"{folder}: a run is writing to it; try again when the run has ended")
        try:
            yield
        finally:
            if locked:
                fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        os.close(descriptor)


def _open(folder: Path) -> int:
    try:
        return os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise StoreError(f"{folder}: cannot be opened: {error.strerror}") from error


def _end_unused(key: tuple[int, int]) -> None:
    """Close a store of this process that gives up the folder."""
    if key in _held:
        gc.collect()
    lock = _held[key].lock() if key in _held else None
    if lock is not None and lock.give_up is not None:
        lock.give_up()
        lock.release()


def _lock(descriptor: int) -> bool | None:
    """Lock a folder. Returns None if it is already locked, and False on a file system without locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return None if error.errno in _TAKEN else False
    return True


def _release(held: _Held) -> None:
    with _guard:
        if _held.get(held.key) is not held:
            return  # the lock belongs to the parent of this fork
        del _held[held.key]
        try:
            if held.locked:  # closing is not enough: a child process being started shares the descriptor
                fcntl.flock(held.descriptor, fcntl.LOCK_UN)
        finally:
            os.close(held.descriptor)


def _forget() -> None:
    """Close the descriptors in a fork: the locks belong to the parent."""
    for held in _held.values():
        os.close(held.descriptor)
    _held.clear()
    _guard.release()


if fcntl is not None:
    os.register_at_fork(before=_guard.acquire, after_in_parent=_guard.release, after_in_child=_forget)
