"""The epochs of the trajectory file that is being gathered, and the thread that writes those that are full."""

from __future__ import annotations

import atexit
import functools
import os
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

from rein.errors import StoreError
from rein.store.folder import file_name, files_of
from rein.store.format.files import reason_of, sync_folder, write_whole
from rein.store.format.image import Memory
from rein.store.format.layout import MAX_ROWS
from rein.store.format.trajectories import (
    WHOLE,
    Part,
    compose_trajectories,
    rows_of,
    size_of,
    split,
    structure,
)
from rein.store.lock import Lock
from rein.store.writer import Writer
from rein.types import Trajectory


class _Epoch(NamedTuple):
    """One that waits, and its size in bytes."""

    trajectory: Trajectory
    size: int


class Files:
    """Takes epochs in memory and writes them to `folder`; `alone`, each to a file of its own, which may be removed."""

    def __init__(self, folder: Path, max_bytes: int, max_epochs: int, max_seconds: float, alone: bool) -> None:
        self.folder = folder
        self._alone = alone
        self.run: str | None = None
        self._in_use = Lock(folder.parent)  # as long as a thread may write there, even when nobody closes the store
        self._limits = max_bytes, max_epochs, max_seconds
        self._lock = threading.RLock()  # over what follows: the writer's thread takes epochs that have grown old
        self._epochs: list[_Epoch] = []
        self._size = self._rows = 0
        self._structure: tuple[Any, ...] = (None, None, None)
        self._since = 0.0
        self._memory = Memory()
        self._writer = Writer(max_bytes, self._write_old, interval=min(max_seconds, 60.0) / 4)
        atexit.register(self.close)  # what nobody closes is not lost; called before h5py's own, which came earlier

    def append(self, trajectory: Trajectory) -> None:
        """Add an epoch to the file, or to the next one where it does not fit."""
        self._writer.check()
        size, rows, mine = size_of(trajectory), rows_of(trajectory), structure(trajectory)
        max_bytes, max_epochs, max_seconds = self._limits
        fits = all(a is None or b is None or a == b for a, b in zip(mine, self._structure, strict=True))
        if not fits or self._size + size > max_bytes or self._rows + rows > MAX_ROWS:
            self._submit()
        if size > max_bytes or rows > MAX_ROWS:
            for part, piece in split(trajectory, max_bytes):
                held = _Epoch(piece, size_of(piece))
                self._writer.submit(functools.partial(self._write, [held], part), held.size)
            return
        with self._lock:
            if not self._epochs:
                self._since, self._structure = time.monotonic(), mine
            self._epochs.append(_Epoch(trajectory, size))
            self._size, self._rows = self._size + size, self._rows + rows
            self._structure = tuple(b if a is None else a for a, b in zip(mine, self._structure, strict=True))
        if len(self._epochs) >= max_epochs or time.monotonic() - self._since >= max_seconds:
            self._submit()

    def remove(self, epoch: int) -> None:
        """Keep that epoch no longer, whether it is in a file already or not."""
        with self._lock:
            stay = [held for held in self._epochs if held.trajectory.epoch != epoch]
            waited = len(stay) < len(self._epochs)
            self._epochs, self._size = stay, sum(held.size for held in stay)
            self._rows = sum(rows_of(held.trajectory) for held in stay)
        if not waited:  # it is in a file, or will be when the thread gets there
            self._submit()  # first what takes its place
            self._writer.submit(functools.partial(self._remove, epoch), 0)

    def flush(self) -> None:
        """Return when every epoch is in a finished file."""
        self._submit()
        self._writer.wait()

    def close(self) -> None:
        """Flush, and end the thread."""
        atexit.unregister(self.close)
        try:
            if self._writer.works:
                self._submit()
        finally:
            try:
                self._writer.close()
            finally:
                self._memory = Memory()  # as large as a file, and of no use any more
                self._in_use.release()

    def release(self) -> None:
        """Close without waiting: the garbage collector calls it from any thread, which may hold HDF5's own lock."""
        if self._writer.works:
            self._submit(wait=False)
            self._writer.submit(functools.partial(atexit.unregister, self.close), 0, wait=False)
            self._writer.end()

    def _submit(self, wait: bool = True) -> None:
        size = self._size
        if epochs := self._take():
            self._writer.submit(functools.partial(self._write, epochs, WHOLE), size, wait)

    def _take(self) -> list[_Epoch]:
        with self._lock:
            epochs, self._epochs, self._size, self._rows = self._epochs, [], 0, 0
        return epochs

    def _write_old(self) -> None:
        if self._epochs and time.monotonic() - self._since >= self._limits[2] and (epochs := self._take()):
            self._write(epochs, WHOLE)

    def _write(self, epochs: list[_Epoch], part: Part) -> None:
        for together in [[epoch] for epoch in epochs] if self._alone else [epochs]:
            self._write_file(together, part)

    def _write_file(self, held: list[_Epoch], part: Part) -> None:
        epochs = [epoch.trajectory for epoch in held]
        first, last = epochs[0].epoch, epochs[-1].epoch
        path = self.folder / file_name(first, last, part)
        if path.exists():
            raise StoreError(f"{path}: is there already; is another process writing to this run?")

        try:
            content = compose_trajectories(epochs, part, self.run, self._memory)
        except Exception as error:  # h5py raises many kinds; each says which epochs
            raise StoreError(f"{path}: epochs {first} to {last} do not fit into an HDF5 file: {error}") from error
        write_whole(path, content)

    def _remove(self, epoch: int) -> None:
        try:
            for path in files_of(self.folder, epoch):
                os.unlink(path)
            sync_folder(self.folder)
        except OSError as error:
            gone = f"epoch {epoch} is no longer wanted, but cannot be removed"
            raise StoreError(f"{self.folder}: {gone}: {reason_of(error)}") from error
