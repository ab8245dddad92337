"""Store that writes trajectories to immutable HDF5 files of about 64 MiB.

`EpochFiles` collects epochs in memory until a file is full. A thread then composes the file and writes it atomically
(`rein.store.format.sealed`). Data survives any crash once `flush` has returned. Any HDF5 viewer opens the files.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import logging
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
from gymnasium.spaces import Space

from rein.errors import StoreError
from rein.files import absolute, inside, short
from rein.store.checkpoint_folder import FOLDER as CHECKPOINTS
from rein.store.checkpoint_folder import Checkpoints
from rein.store.folder import (
    ASIDE,
    TRAJECTORIES,
    Lock,
    claim,
    file_name,
    files_of,
    is_whole,
    list_files,
    move_aside,
    newer_files,
)
from rein.store.format.layout import MAX_ROWS
from rein.store.format.sealed import reason_of, sync_folder, write_whole
from rein.store.format.trajectory_writer import (
    WHOLE,
    Part,
    compose_trajectories,
    rows_of,
    size_of,
    split,
    structure,
)
from rein.store.memory_store import check_names, to_host
from rein.store.writer_thread import WriterThread
from rein.types import Trajectory

Best = tuple[int, str, Literal["min", "max"]]  # number of epochs, metric, mode

logger = logging.getLogger("rein")


class HDF5Store:
    """Store that writes the epochs of a run to `path/trajectories/000001-000128.h5` and further files.

    A file ends when it reaches `max_bytes`, `max_epochs` or `max_seconds`, and at `flush`. An epoch larger than
    `max_bytes` is split by rows. While `every` and `keep_best` have selected no epoch, `flush` writes the last one, so
    that no run ends without any. `append` copies the trajectory and returns; it blocks only while more than `max_bytes`
    are queued for the disk. It raises errors of earlier writes.

    Args:
        path: folder of the run, created with its parents. `~` is expanded, and a relative path is resolved immediately.
        exist: action if the folder exists: "error" raises StoreError, "resume" continues the run (the folder may also
            be missing), "new" uses the next free name, such as `runs/cartpole-2`. See the attribute `path`.
        fields: names of the fields to keep; by default all fields. Without `observation`, next and final observations
            are dropped too. `valid` is always kept.
        every: keep epochs n, 2n, 3n, ...; 0 keeps none, for example if only evaluations are to be kept.
        keep_best: number of epochs to keep, metric, and "min" or "max", such as `(5, "episode_return", "max")`. Each
            epoch is in a separate file, which is removed when a better epoch replaces it.
        max_bytes: bytes of data in a file, before compression. A file has at most 4,194,304 rows of all environments.
        max_epochs: epochs in a file.
        max_seconds: maximum seconds from the first epoch of a file until the file is written.

    Raises:
        StoreError: the folder exists, another process or an open store of this process writes to it, or a write fails.
            The message has the path and the reason.
        ValueError: an argument or a trajectory is invalid, or an epoch is appended twice.
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
            raise ValueError(f"HDF5Store({max_bytes=}, {max_epochs=}, {max_seconds=}): all must be positive")
        if fields is not None and (isinstance(fields, str) or not fields):
            raise ValueError(f"HDF5Store(fields={fields!r}): must be a list of names, or None for all fields")
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
        self._files = EpochFiles(self.path / TRAJECTORIES, *limits, alone=keep_best is not None)
        self._finalizer = weakref.finalize(self, self._files.release)
        self._finalizer.atexit = False
        self._last_epoch = 0
        self._last: Trajectory | None = None  # copy of the last epoch while no epoch was selected
        self._substitute: int | None = None  # epoch that was written because none was selected
        self._reported: int | None = None  # substitute that a warning has named
        self._resumes = exist == "resume"

    @property
    def config(self) -> dict[str, Any]:
        """Constructor arguments as JSON."""
        return dict(self._config)

    @functools.cached_property
    def checkpoints(self) -> Checkpoints:
        """The checkpoints in the run's folder, for `rein.handlers.checkpoint`."""
        return Checkpoints(inside(self.path, CHECKPOINTS))

    def check_spaces(self, spaces: Mapping[str, Space[Any]]) -> None:
        """Raise ValueError if the space of a kept field contains a name that HDF5 cannot store.

        HDF5 treats "/" and "." as parts of a path.
        """
        names = self._config["fields"]
        for field, space in spaces.items() if self._config["every"] else ():
            if names is None or field in names:
                check_names(space, field)

    @property
    def read_metric(self) -> str | None:
        """The metric by which epochs are kept, or None."""
        return None if self._selection.best is None else self._selection.best[1]

    def begin(self, epochs: int) -> None:
        """Check the store for a run that has ended `epochs` epochs, before anything in the folder is changed.

        Raises ValueError if the store holds later epochs, which another loop has appended.
        """
        self._check_open()
        self._files.lock.give_up = None
        if self._last_epoch > epochs:
            raise ValueError(
                f"{self.path}: holds {self._last_epoch} epochs of another loop, but this loop has ended {epochs}; "
                "continue the other loop with loop.run(epochs=...), or use a new store, HDF5Store(path, 'new')"
            )
        if self._resumes and newer_files(self.path, epochs):
            logger.warning(
                "%s: this run starts over, and files of the earlier run are moved to %s/; to continue the earlier run, "
                "call rein.resume(loop, path) before loop.run()",
                self.path,
                ASIDE,
            )

    def append(self, trajectory: Trajectory) -> None:
        """Append a copy of one epoch if the store keeps it."""
        self._check_open()
        if trajectory.epoch <= self._last_epoch:
            raise ValueError(
                f"{self.path}: got epoch {trajectory.epoch} after epoch {self._last_epoch}; use one store per run"
            )
        wanted = self._selection.wants(trajectory)
        copied = wanted or self._selection.awaits_first
        copy = to_host(trajectory, self._config["fields"]) if copied else None
        if self._resumes:  # no state was loaded: the run starts over in the folder of an earlier one
            self._set_aside(after=trajectory.epoch - 1)
            self._resumes = False
        if wanted and copy is not None:
            self._files.append(copy)
            self._remove_substitute()
            for epoch in self._selection.enter(trajectory):
                self._files.remove(epoch)
        self._last = None if wanted else copy
        self._last_epoch = trajectory.epoch

    def _remove_substitute(self) -> None:
        """Remove the epoch that was written because none was selected."""
        if self._substitute is not None:
            self._files.remove(self._substitute)
        self._substitute = None

    def flush(self) -> None:
        """Write the open file, even if it is small. All appended epochs are safe on the disk when this returns."""
        self._check_open()
        self._write_last()
        self._files.flush()

    def _write_last(self) -> None:
        if self._last is not None:
            self._files.append(self._last)
            self._remove_substitute()
            self._substitute = self._last.epoch
            self._last = None

    def end(self) -> None:
        """Flush at the end of a run, and warn if the last epoch was kept only because none was selected.

        Another store of this process may open the folder from now on, which closes this one.
        """
        store = weakref.ref(self)
        self._files.lock.give_up = lambda: opened.close() if (opened := store()) is not None else None
        self.flush()
        self._report_substitute()

    def _report_substitute(self) -> None:
        if self._substitute not in (None, self._reported):
            self._reported = self._substitute
            logger.warning("%s: %r selected no epoch, so the last one is kept", self.path, self._selection)

    def close(self) -> None:
        """Flush and end the writer's thread. A second call does nothing. Raises StoreError if a write failed."""
        if self._finalizer.detach():
            with contextlib.ExitStack() as last:
                last.callback(self._files.close)  # releases the lock on the folder
                last.callback(self.checkpoints.close)
                if self._files.works:
                    self._write_last()
                    self._report_substitute()

    def write_run(self, info: Mapping[str, Any]) -> None:
        """Write `run.json` in the run's folder. Later trajectory files contain a copy of it.

        Raises TypeError for values that cannot be converted to JSON. NumPy numbers can.
        """
        text = json.dumps(info, indent=2, default=_plain)
        write_whole(self.path / "run.json", (text + "\n").encode())
        self._files.run = text

    def state_dict(self) -> dict[str, Any]:
        """Return the last epoch and the best epochs. Flushes first, because a checkpoint relies on these files."""
        self.flush()
        more = {"best": self._selection.state(), "substitute": self._substitute}
        return {"epoch": self._last_epoch, **{name: value for name, value in more.items() if value is not None}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue after the epoch of `state`. Files with newer epochs are moved to `aside/`, never deleted."""
        self.flush()
        epoch = int(state["epoch"])
        self._set_aside(after=epoch)
        # some of the best epochs may have been replaced since by an epoch that the run will repeat
        self._selection.load(epoch, state.get("best"), lambda number: is_whole(self._files.folder, number))
        self._last, self._substitute = None, state.get("substitute")
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
    """Convert a NumPy number to a Python number. Raises TypeError for other values that JSON does not support."""
    for kind, plain in ((np.bool_, bool), (np.integer, int), (np.floating, float)):
        if isinstance(value, kind):
            return plain(value)  # `item` would return a long double unchanged
    text = f"{type(value).__name__} {value!r}"
    raise TypeError(f"{text:.100} cannot be written to run.json: `config` must hold numbers, strings and lists")


class Selection:
    """Decides for each epoch in turn whether it is kept. With `best`, an epoch may replace an earlier one."""

    def __init__(self, every: int = 1, best: Best | None = None) -> None:
        """Raises ValueError for invalid arguments."""
        if type(every) is not int or every < 0:
            raise ValueError(f"every={every}: must be 1 to keep all epochs, n to keep every n-th epoch, or 0 for none")
        if best is not None and not _is_valid(best):
            raise ValueError(
                f'keep_best={best!r}: must be (number, metric, "min" or "max"), as (5, "episode_return", "max")'
            )
        self.every, self.best = every, None if best is None else (best[0], best[1], best[2])
        self.scores: dict[int, float] = {}  # epoch -> metric, of the best epochs
        self._has_epoch = False  # whether an epoch was selected; not used with `best`

    def wants(self, trajectory: Trajectory) -> bool:
        """Return whether to keep an epoch. With `best`, an epoch whose metric is missing or NaN is not kept."""
        if not self.every or trajectory.epoch % self.every:
            return False
        if self.best is None:
            return True
        score = self._signed(trajectory.metrics.get(self.best[1], math.nan))
        worst = min(map(self._signed, self.scores.values()), default=-math.inf)
        return not math.isnan(score) and (len(self.scores) < self.best[0] or score > worst)

    def enter(self, trajectory: Trajectory) -> list[int]:
        """Record an epoch as kept. Returns the epochs that it replaces. On ties, the oldest epoch is kept."""
        if self.best is None:
            self._has_epoch = True
            return []
        self.scores[trajectory.epoch] = float(trajectory.metrics[self.best[1]])
        displaced = sorted(self.scores, key=lambda epoch: (-self._signed(self.scores[epoch]), epoch))[self.best[0] :]
        for epoch in displaced:
            del self.scores[epoch]
        return displaced

    @property
    def awaits_first(self) -> bool:
        """Whether some epochs are to be kept and none was so far."""
        return self.every > 0 and not (self._has_epoch if self.best is None else self.scores)

    def __repr__(self) -> str:
        return f"every={self.every}" if self.best is None else f"keep_best={self.best!r}"

    def state(self) -> list[Any] | None:
        """Return the metric and the best epochs so far, for `load`."""
        return None if self.best is None else [*self.best[1:], [[epoch, score] for epoch, score in self.scores.items()]]

    def load(self, epoch: int, state: Any, is_there: Callable[[int], bool]) -> None:
        """Continue after `epoch` with the best epochs so far, without missing ones.

        Loads none if `state` has another metric or mode.
        """
        self._has_epoch = 0 < self.every <= epoch
        if self.best is not None:
            metric, mode, scores = state or (None, None, ())
            same = (metric, mode) == self.best[1:]
            self.scores = {int(epoch): float(score) for epoch, score in scores if same and is_there(int(epoch))}

    def _signed(self, score: float) -> float:
        """Return the score, or its negative if the smallest is best."""
        return score if self.best is not None and self.best[2] == "max" else -score


def _is_valid(best: Any) -> bool:
    if not isinstance(best, list | tuple) or len(best) != 3:
        return False
    count, metric, mode = best
    return type(count) is int and count > 0 and isinstance(metric, str) and mode in ("min", "max")


class EpochFiles:
    """Collects epochs in memory and writes them to `folder`. With `alone`, each epoch gets a separate file."""

    def __init__(self, folder: Path, max_bytes: int, max_epochs: int, max_seconds: float, alone: bool) -> None:
        self.folder = folder
        self._alone = alone
        self.run: str | None = None
        self.lock = Lock(folder.parent)  # held as long as a thread may write, even if the store is never closed
        self._limits = max_bytes, max_epochs, max_seconds
        self._lock = threading.RLock()  # guards the attributes below: the writer's thread takes epochs that are due
        self._epochs: list[Trajectory] = []
        self._size = self._rows = 0
        self._structure: tuple[Any, ...] = (None, None, None)
        self._since = 0.0
        self._writer = WriterThread(max_bytes, self._write_old, interval=min(max_seconds, 60.0) / 4)
        atexit.register(self.close)  # saves the epochs of a store that is never closed; runs before h5py's exit handler

    def append(self, trajectory: Trajectory) -> None:
        """Add an epoch to the open file, or to a new file if it does not fit."""
        self._writer.check()
        size, rows, kinds = size_of(trajectory), rows_of(trajectory), structure(trajectory)
        max_bytes, max_epochs, max_seconds = self._limits
        fits = all(a is None or b is None or a == b for a, b in zip(kinds, self._structure, strict=True))
        if not fits or self._size + size > max_bytes or self._rows + rows > MAX_ROWS:
            self._submit()
        if size > max_bytes or rows > MAX_ROWS:
            for part, piece in split(trajectory, max_bytes):
                self._writer.submit(functools.partial(self._write, [piece], part), size_of(piece))
            return
        with self._lock:
            if not self._epochs:
                self._since, self._structure = time.monotonic(), kinds
            self._epochs.append(trajectory)
            self._size += size
            self._rows += rows
            self._structure = tuple(b if a is None else a for a, b in zip(kinds, self._structure, strict=True))
        if len(self._epochs) >= max_epochs or time.monotonic() - self._since >= max_seconds:
            self._submit()

    def remove(self, epoch: int) -> None:
        """Remove an epoch, whether it is already in a file or still in memory."""
        with self._lock:
            stay = [trajectory for trajectory in self._epochs if trajectory.epoch != epoch]
            waited = len(stay) < len(self._epochs)
            self._epochs = stay
            self._size = sum(map(size_of, stay))
            self._rows = sum(map(rows_of, stay))
        if not waited:  # the epoch is in a file, or queued for one
            self._submit()  # write the epoch that replaces it first
            self._writer.submit(functools.partial(self._remove, epoch), 0)

    def flush(self) -> None:
        """Wait until every epoch is in a finished file."""
        self._submit()
        self._writer.wait()

    @property
    def works(self) -> bool:
        """Whether no write has failed, and the thread belongs to this process."""
        return self._writer.works

    def close(self) -> None:
        """Flush and end the thread."""
        atexit.unregister(self.close)
        with contextlib.ExitStack() as last:
            last.callback(self.lock.release)
            last.callback(self._writer.close)
            if self.works:
                self._submit()

    def release(self) -> None:
        """Close without waiting. The garbage collector may call this from a thread that holds the lock of HDF5."""
        self.lock.give_up = self._writer.join
        if self.works:
            self._submit(wait=False)
            self._writer.submit(functools.partial(atexit.unregister, self.close), 0, wait=False)
            self._writer.end()

    def _submit(self, wait: bool = True) -> None:
        if epochs := self._take():
            self._writer.submit(functools.partial(self._write, epochs, WHOLE), sum(map(size_of, epochs)), wait)

    def _take(self) -> list[Trajectory]:
        with self._lock:
            epochs, self._epochs, self._size, self._rows = self._epochs, [], 0, 0
        return epochs

    def _write_old(self) -> None:
        if self._epochs and time.monotonic() - self._since >= self._limits[2] and (epochs := self._take()):
            self._write(epochs, WHOLE)

    def _write(self, epochs: list[Trajectory], part: Part) -> None:
        for group in [[epoch] for epoch in epochs] if self._alone else [epochs]:
            self._write_file(group, part)

    def _write_file(self, epochs: list[Trajectory], part: Part) -> None:
        first, last = epochs[0].epoch, epochs[-1].epoch
        path = self.folder / file_name(first, last, part)
        if path.exists():
            raise StoreError(f"{path}: exists already; is another process writing to this run?")

        try:
            content = compose_trajectories(epochs, part, self.run)
        except Exception as error:  # h5py raises many kinds of errors
            raise StoreError(f"{path}: epochs {first} to {last} do not fit into an HDF5 file: {error}") from error
        write_whole(path, content)

    def _remove(self, epoch: int) -> None:
        try:
            for path in files_of(self.folder, epoch):
                os.unlink(path)
            sync_folder(self.folder)
        except OSError as error:
            message = f"epoch {epoch} was replaced by a better one but cannot be removed"
            raise StoreError(f"{self.folder}: {message}: {reason_of(error)}") from error
