"""Trajectories in HDF5 files that are finished, immutable and at most about 64 MiB each.

Epochs are gathered in memory until a file is full; then it is composed and written by a thread, whole or not at all
(`rein.store.format.files`). What `flush` returned from is safe from any crash, and any viewer opens it.
"""

from __future__ import annotations

import functools
import json
import logging
import weakref
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
from gymnasium.spaces import Space

from rein.errors import StoreError
from rein.files import absolute, inside, short
from rein.store.checkpoints import FOLDER as CHECKPOINTS
from rein.store.checkpoints import Checkpoints
from rein.store.folder import ASIDE, TRAJECTORIES, claim, is_whole, list_files, move_aside, newer_files
from rein.store.format.files import write_whole
from rein.store.gathering import Files
from rein.store.host import check_names, to_host
from rein.store.selection import Best, Selection
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
