"""Trajectories in HDF5 files that are finished, immutable and at most about 64 MiB each.

Epochs are gathered in memory until a file is full; then it is composed and written by a thread, whole or not at all
(`rein.stores.files`). What `flush` returned from is safe from any crash, and any viewer opens it.
"""

from __future__ import annotations

import atexit
import functools
import json
import threading
import time
import weakref
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal

from rein.errors import StoreError
from rein.stores.checkpoints import FOLDER as CHECKPOINTS
from rein.stores.checkpoints import Checkpoints
from rein.stores.files import write_whole
from rein.stores.folder import TRAJECTORIES, claim, file_name, move_aside, newer_files
from rein.stores.host import to_host
from rein.stores.image import Memory, compose
from rein.stores.layout import WHOLE, Part, size_of, split, structure, write_trajectories
from rein.stores.lock import Lock
from rein.stores.writer import Writer
from rein.types import Trajectory


class HDF5Store:
    """Keeps every epoch in `path/trajectories/000001-000128.h5` and so on; `path` is the folder of the run.

    A file is closed by bytes of data, by number of epochs or by seconds since its first epoch, whichever comes first,
    and by `flush`. An epoch larger than `max_bytes` is cut by rows. `append` copies what it is given, waits only when
    more than `max_bytes` wait for the disk, and raises what went wrong in the meantime.

    Args:
        path: the folder of the run; created, with its parents.
        exist: what to do when it is there already: "error"; "resume", go on with it (it may also be missing); "new",
            take the next free name, `runs/cartpole-2`. The attribute `path` says which folder is used.
        fields: names of the fields to keep; all of them by default. Without `observation`, no next and final ones.
        max_bytes: bytes of data in a file, before compression.
        max_epochs: epochs in a file.
        max_seconds: how long an epoch may wait to be written.

    Raises:
        StoreError: the folder exists, is being compacted, or something cannot be written: with the path and the
            system's reason.
        ValueError: an argument or a trajectory makes no sense, or an epoch comes twice.
    """

    def __init__(
        self,
        path: str | Path,
        exist: Literal["error", "resume", "new"] = "error",
        *,
        fields: Collection[str] | None = None,
        max_bytes: int = 64 << 20,
        max_epochs: int = 1000,
        max_seconds: float = 60.0,
    ) -> None:
        if min(max_bytes, max_epochs, max_seconds) <= 0:
            raise ValueError(f"HDF5Store({max_bytes=}, {max_epochs=}, {max_seconds=}): give numbers above 0")
        if fields is not None and (isinstance(fields, str) or not fields):
            raise ValueError(f"HDF5Store(fields={fields!r}): give a list of names, or None for all fields")
        self._config: dict[str, Any] = dict(
            path=str(path),
            exist=exist,
            fields=None if fields is None else list(fields),
            max_bytes=max_bytes,
            max_epochs=max_epochs,
            max_seconds=max_seconds,
        )
        self.path = claim(Path(path), exist)
        self._files = _Files(self.path / TRAJECTORIES, max_bytes, max_epochs, max_seconds)
        self._finalizer = weakref.finalize(self, self._files.release)
        self._finalizer.atexit = False
        self._last_epoch = 0
        self._resumes = exist == "resume"

    @property
    def config(self) -> dict[str, Any]:
        """What it was built with, as JSON."""
        return dict(self._config)

    @functools.cached_property
    def checkpoints(self) -> Checkpoints:
        """The checkpoints in the run's folder, for `rein.handlers.checkpoint`."""
        return Checkpoints(self.path / CHECKPOINTS)

    def append(self, trajectory: Trajectory) -> None:
        """Take in one epoch; the caller may reuse its memory at once."""
        self._check_open()
        if trajectory.epoch <= self._last_epoch:
            raise ValueError(
                f"{self.path}: epoch {trajectory.epoch} after epoch {self._last_epoch}; a store keeps one run"
            )
        copy = to_host(trajectory, self._config["fields"])
        if self._resumes:  # nobody loaded a state: the run begins anew, over files of the one before
            self._set_aside(after=trajectory.epoch - 1)
            self._resumes = False
        self._files.append(copy)
        self._last_epoch = trajectory.epoch

    def flush(self) -> None:
        """Finish the open file, even a small one; on return everything appended is safe."""
        self._check_open()
        self._files.flush()

    def close(self) -> None:
        """Flush and end the writer's thread; may be called twice. Raises StoreError if something was not written."""
        if self._finalizer.detach():
            try:
                self._files.close()
            finally:
                self.checkpoints.close()

    def write_run(self, info: Mapping[str, Any]) -> None:
        """Write `run.json` in the run's folder; trajectory files from now on carry the same, for it may get lost."""
        text = json.dumps(info, indent=2)
        write_whole(self.path / "run.json", (text + "\n").encode())
        self._files.run = text

    def state_dict(self) -> dict[str, Any]:
        """How far the files go. Flushes first: what a checkpoint counts on must be safe before it."""
        self.flush()
        return {"epoch": self._last_epoch}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after the epoch of `state`; files with newer ones are moved to `aside/`, never deleted."""
        self.flush()
        epoch = int(state["epoch"])
        self._set_aside(after=epoch)
        self._last_epoch, self._resumes = epoch, False

    def _set_aside(self, after: int) -> None:
        move_aside(self.path, newer_files(self.path, after), f"epoch-{after:06d}")

    def _check_open(self) -> None:
        if not self._finalizer.alive:
            raise StoreError(f"{self.path}: the store is closed")


class _Files:
    """The epochs of the file that is being gathered, and the thread that writes those that are full."""

    def __init__(self, folder: Path, max_bytes: int, max_epochs: int, max_seconds: float) -> None:
        self.folder = folder
        self.run: str | None = None
        self._in_use = Lock(folder.parent)  # as long as a thread may write there, even when nobody closes the store
        self._limits = max_bytes, max_epochs, max_seconds
        self._lock = threading.RLock()  # over what follows: the writer's thread takes epochs that have grown old
        self._epochs: list[Trajectory] = []
        self._size = 0
        self._structure: tuple[Any, ...] = (None, None, None)
        self._since = 0.0
        self._memory = Memory()
        self._writer = Writer(max_bytes, self._write_old, interval=min(max_seconds, 60.0) / 4)
        atexit.register(self.close)  # what nobody closes is not lost; called before h5py's own, which came earlier

    def append(self, trajectory: Trajectory) -> None:
        """Add an epoch to the file, or to the next one where it does not fit."""
        self._writer.check()
        size, mine = size_of(trajectory), structure(trajectory)
        max_bytes, max_epochs, max_seconds = self._limits
        fits = all(a is None or b is None or a == b for a, b in zip(mine, self._structure, strict=True))
        if not fits or self._size + size > max_bytes:
            self._submit()
        if size > max_bytes:
            for part, piece in split(trajectory, max_bytes):
                self._writer.submit(functools.partial(self._write, [piece], part), size_of(piece))
            return
        with self._lock:
            if not self._epochs:
                self._since, self._structure = time.monotonic(), mine
            self._epochs.append(trajectory)
            self._size += size
            self._structure = tuple(b if a is None else a for a, b in zip(mine, self._structure, strict=True))
        if len(self._epochs) >= max_epochs or time.monotonic() - self._since >= max_seconds:
            self._submit()

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

    def _take(self) -> list[Trajectory]:
        with self._lock:
            epochs, self._epochs, self._size = self._epochs, [], 0
        return epochs

    def _write_old(self) -> None:
        if self._epochs and time.monotonic() - self._since >= self._limits[2] and (epochs := self._take()):
            self._write(epochs, WHOLE)

    def _write(self, epochs: list[Trajectory], part: Part) -> None:
        first, last = epochs[0].epoch, epochs[-1].epoch
        path = self.folder / file_name(first, last, part)
        if path.exists():
            raise StoreError(f"{path}: is there already; is another process writing to this run?")

        def build(file: Any) -> None:
            write_trajectories(file, epochs, part, self.run)

        try:
            content = compose(build, self._memory, capacity=sum(map(size_of, epochs)))
        except Exception as error:
            raise StoreError(f"{path}: epochs {first} to {last} do not fit into an HDF5 file: {error}") from error
        write_whole(path, content)
