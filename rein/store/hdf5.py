"""Store that writes trajectories to immutable HDF5 files of about 64 MiB.

`Files` gathers epochs in memory until a file is full. A thread then composes the file and writes it, whole or not at
all (`rein.store.format.sealed`). Data is safe from any crash once `flush` has returned, and any viewer opens it.
"""

from __future__ import annotations

import atexit
import functools
import json
import logging
import os
import threading
import time
import weakref
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from gymnasium.spaces import Space

from rein.errors import StoreError
from rein.files import absolute, inside, short
from rein.store.checkpoint_folder import FOLDER as CHECKPOINTS
from rein.store.checkpoint_folder import Checkpoints
from rein.store.folder import (
    ASIDE,
    TRAJECTORIES,
    claim,
    file_name,
    files_of,
    is_whole,
    list_files,
    move_aside,
    newer_files,
)
from rein.store.format.layout import MAX_ROWS
from rein.store.format.sealed import Memory, reason_of, sync_folder, write_whole
from rein.store.format.trajectory_writer import (
    WHOLE,
    Part,
    compose_trajectories,
    rows_of,
    size_of,
    split,
    structure,
)
from rein.store.host_copy import check_names, to_host
from rein.store.lock import Lock
from rein.store.selection import Best, Selection
from rein.store.writer_thread import Writer
from rein.types import Trajectory

logger = logging.getLogger("rein")


class HDF5Store:
    """Keeps every epoch in `path/trajectories/000001-000128.h5` and so on; `path` is the folder of the run.

    A file is closed by bytes of data, by number of epochs or by seconds since its first epoch, whichever comes first,
    and by `flush`. An epoch larger than `max_bytes` is cut by rows. `append` copies what it is given, waits only when
    more than `max_bytes` wait for the disk, and raises what went wrong in the meantime.

    Args:
        path: the folder of the run, created with its parents. `~` is expanded, and a relative path is resolved now.
        exist: what to do when it is there already: "error"; "resume", go on with it (it may also be missing); "new",
            take the next free name, `runs/cartpole-2`. The attribute `path` says which folder is used.
        fields: names of the fields to keep; all of them by default. Without `observation`, no next and final ones.
            `valid`, which says what the others are, is kept in any case.
        every: keep epochs n, 2n, 3n, ...; 0 keeps none, as for a run of which only evaluations are to be kept.
        keep_best: how many epochs to keep, by which metric, and whether it is best at its "min" or "max", as in
            `(5, "episode_return", "max")`. Each is in a file of its own, removed when a better one has taken its place.
        max_bytes: bytes of data in a file, before compression. A file has at most 4,194,304 rows of all environments.
        max_epochs: epochs in a file.
        max_seconds: how long an epoch may wait to be written.

    Raises:
        StoreError: the folder exists, another process writes to it, or something cannot be written: with
            the path and the system's reason.
        ValueError: an argument or a trajectory makes no sense, or an epoch comes twice.
    """

    def __init__(
        self,
        path: str | Path,
        exist: Literal["error", "resume", "new"] = "error",
        *,
        fields: Collection[str] | None = None,
        every: int = 1,
        keep_best: Best | None = None,
        max_bytes: int = 64 << 20,
        max_epochs: int = 1000,
        max_seconds: float = 60.0,
    ) -> None:
        if min(max_bytes, max_epochs, max_seconds) <= 0:
            raise ValueError(f"HDF5Store({max_bytes=}, {max_epochs=}, {max_seconds=}): give numbers above 0")
        if fields is not None and (isinstance(fields, str) or not fields):
            raise ValueError(f"HDF5Store(fields={fields!r}): give a list of names, or None for all fields")
        self._selection = Selection(every, keep_best)
        self._config: dict[str, Any] = dict(
            path=str(path),
            exist=exist,
            fields=None if fields is None else list(fields),
            every=every,
            keep_best=None if keep_best is None else list(keep_best),
            max_bytes=max_bytes,
            max_epochs=max_epochs,
            max_seconds=max_seconds,
        )
        self.path = claim(absolute(path), exist)
        limits = max_bytes, max_epochs, max_seconds
        self._files = Files(self.path / TRAJECTORIES, *limits, alone=keep_best is not None)
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
        return Checkpoints(inside(self.path, CHECKPOINTS))

    def check_spaces(self, spaces: Mapping[str, Space[Any]]) -> None:
        """Raises ValueError where a name in the spaces of these fields, by name, is none that it can hold.

        HDF5 takes "/" and "." for parts of a path. Fields that are not kept may be named as they like.
        """
        kept = self._config["fields"]
        for field, space in spaces.items() if self._config["every"] else ():
            if kept is None or field in kept:
                check_names(space, field)

    def begin(self, epochs: int) -> None:
        """A run begins, or goes on, that has had so many epochs; asked before anything in the folder is changed.

        Raises ValueError where the store holds more, which another loop gave it.
        """
        self._check_open()
        if self._last_epoch > epochs:
            raise ValueError(
                f"{self.path}: it holds {self._last_epoch} epochs of another loop, and this one has had {epochs}: go "
                "on with that one, loop.run(epochs=...), or give this one a store of its own, HDF5Store(path, 'new')"
            )
        if self._resumes and newer_files(self.path, epochs):
            logger.warning(
                "%s: this run begins anew, and what is there of an earlier one goes to %s/; to go on with that one, "
                "call rein.resume(loop, path) before loop.run()",
                self.path,
                ASIDE,
            )

    def append(self, trajectory: Trajectory) -> None:
        """Take in one epoch, if it is one of those to be kept; the caller may reuse its memory at once."""
        self._check_open()
        if trajectory.epoch <= self._last_epoch:
            raise ValueError(
                f"{self.path}: epoch {trajectory.epoch} after epoch {self._last_epoch}; a store keeps one run"
            )
        wanted = self._selection.wants(trajectory)
        copy = to_host(trajectory, self._config["fields"]) if wanted else None
        if self._resumes:  # nobody loaded a state: the run begins anew, over files of the one before
            self._set_aside(after=trajectory.epoch - 1)
            self._resumes = False
        if copy is not None:
            self._files.append(copy)
            for epoch in self._selection.enter(trajectory):
                self._files.remove(epoch)
        self._last_epoch = trajectory.epoch

    def flush(self) -> None:
        """Finish the open file, even a small one; on return everything appended is safe."""
        self._check_open()
        self._files.flush()

    def close(self) -> None:
        """Flush and end the writer's thread; may be called twice. Raises StoreError if something was not written."""
        if self._finalizer.detach():
            if warning := self._selection.warning:
                logger.warning("%s: %s", self.path, warning)
            try:
                self.checkpoints.close()  # first: the files let go of the lock on the folder
            finally:
                self._files.close()

    def write_run(self, info: Mapping[str, Any]) -> None:
        """Write `run.json` in the run's folder; trajectory files from now on carry the same, for it may get lost.

        Raises TypeError for what cannot be written as JSON; numbers of numpy's can.
        """
        text = json.dumps(info, indent=2, default=_plain)
        write_whole(self.path / "run.json", (text + "\n").encode())
        self._files.run = text

    def state_dict(self) -> dict[str, Any]:
        """How far the files go. Flushes first: what a checkpoint counts on must be safe before it."""
        self.flush()
        best = self._selection.state()
        return {"epoch": self._last_epoch, **({} if best is None else {"best": best})}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on after the epoch of `state`; files with newer ones are moved to `aside/`, never deleted."""
        self.flush()
        epoch = int(state["epoch"])
        self._set_aside(after=epoch)
        # some may have lost their places since, to one that comes again
        self._selection.load(state.get("best"), lambda number: is_whole(self._files.folder, number))
        self._last_epoch, self._resumes = epoch, False

    def _set_aside(self, after: int) -> None:
        move_aside(self.path, newer_files(self.path, after), f"epoch-{after:06d}")

    def __repr__(self) -> str:
        sizes = [file.stat().st_size for file in list_files(self._files.folder)]
        return f"HDF5Store({str(short(self.path))!r}, {len(sizes)} files, {sum(sizes) / 2**20:.1f} MiB)"

    def _check_open(self) -> None:
        if not self._finalizer.alive:
            raise StoreError(f"{self.path}: the store is closed")


def _plain(value: Any) -> Any:
    """What JSON has no form for: a number of numpy's becomes Python's."""
    for kind, plain in ((np.bool_, bool), (np.integer, int), (np.floating, float)):
        if isinstance(value, kind):
            return plain(value)
    what = f"{type(value).__name__} {value!r}"
    raise TypeError(f"{what:.100} cannot be written to run.json: a part's `config` holds numbers, strings and lists")


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
