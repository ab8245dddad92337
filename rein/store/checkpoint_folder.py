"""Folder of checkpoints: a background thread writes them, and retention rules decide which ones are kept.

Files::

    checkpoints/epoch-000100.h5                     after epoch 100
    checkpoints/epoch-000101-iteration-000017.h5    in the middle of epoch 101
    checkpoints/best/epoch-000040.h5                best checkpoint by the metrics that the file lists
    checkpoints/rows/<sha256>.h5                    rows of replay buffers, see `rein.store.checkpoint_file`
    checkpoints/latest                              name of the newest checkpoint
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import logging
import math
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from rein.errors import CheckpointError, StoreError
from rein.files import absolute, inside, make_folder
from rein.loop import Loop
from rein.ops.trees import leaves
from rein.store.checkpoint_file import (
    BEST,
    Checkpoint,
    Shards,
    describe,
    is_finite,
    look,
    names_of,
    read_checkpoint,
    write_checkpoint,
)
from rein.store.folder import move_aside
from rein.store.format.sealed import remove_leftovers, sync_folder, write_whole
from rein.store.format.state_codec import Shard, snapshot
from rein.store.writer_thread import WriterThread

FOLDER = "checkpoints"
LATEST = "latest"

Order = tuple[int, int]  # finished iterations and finished epochs
Best = tuple[str, Literal["min", "max"]]  # a metric, and whether its smallest or largest value is best

_WAITING = 256 << 20  # bytes that may be queued for the disk before `take` blocks

logger = logging.getLogger(__name__)


class Checkpoints:
    """Folder of checkpoints. `take` copies a loop's state and returns; a thread writes the copy atomically.

    Checkpoints are safe on the disk once `flush` has returned. The first checkpoint creates the folder. Only files
    that rein wrote are removed. Your own files, and copies under another name, are kept.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = absolute(folder)
        self.shared: weakref.WeakKeyDictionary[Loop, Any] = weakref.WeakKeyDictionary()  # between handlers of one loop
        self._written: dict[Path, dict[str, Any]] = {}  # descriptions of existing checkpoints that rein wrote
        self._others: list[dict[str, Any]] = []  # descriptions of checkpoints that the user put here
        self._shards = Shards(self.folder)
        self._writers: list[WriterThread] = []  # at most one; the finalizer holds the list instead of this object
        self._finalizer = weakref.finalize(self, _end, self._writers)

    def begin(self, loop: Loop) -> None:
        """Prepare the folder for a run that continues from the present state of `loop`.

        Checkpoints of another run that are newer are moved to `aside/`. Temporary files of dead processes are removed.
        Raises CheckpointError if the folder cannot be read or changed.
        """
        self.flush()
        try:
            for folder in (self.folder, inside(self.folder, BEST), self._shards.folder):
                remove_leftovers(folder)
            run = self.folder.parent if self.folder.name == FOLDER else self.folder
            newer = self.newer(order_of(loop))
            move_aside(run, newer, stem_of(loop), shared=self.rows_of(newer))
            abouts = {path: about for path in saved_files(self.folder) if (about := look(path))}
            own = {path for path, about in abouts.items() if is_own(path, about) and "best" not in about}
            self._written = {path: abouts[path] for path in own}
            self._others = [about for path, about in abouts.items() if path not in own]
            self._clean_rows()
        except (OSError, StoreError) as error:
            raise CheckpointError(f"{self.folder}: cannot be prepared: {error}") from error

    def take(
        self,
        loop: Loop,
        rules: Mapping[str, Any] | Sequence[Mapping[str, Any]],
        stem: str | None = None,
        on_failure: Literal["raise", "warn"] = "raise",
        on_saved: Callable[[Path], None] | None = None,
        *,
        state: Mapping[str, Any] | None = None,
        omitted: Sequence[str] = (),
    ) -> Path:
        """Copy the state of `loop` and queue it to be written to `<stem>.h5`. Returns that path.

        `rules` holds the fields of `Rules`, of one handler or of several. A rule has `best` only if the metric was
        assigned to this state. Without rules, the checkpoint replaces the last one that was saved without rules.
        `on_saved(path)` is called on the writer's thread when the file is safe on the disk. `state` is saved instead of
        that of the loop; `omitted` names parts that it lacks. This method blocks while too many bytes are queued.
        Raises CheckpointError if an earlier write failed.
        """
        every = [Rules(**one) for one in ([rules] if isinstance(rules, Mapping) else rules)]
        stem = stem_of(loop) if stem is None else stem
        if not stem or "/" in stem or stem[0] == ".":
            raise ValueError(f"invalid checkpoint name {stem!r}: it must not be empty, contain '/' or begin with '.'")
        about = {**describe(loop), "omitted": [*omitted], "at_end": not every}
        copied: Any = snapshot(loop.state_dict() if state is None else state, self._shards.hold)
        path = self.folder / f"{stem}.h5"
        about |= {"finite": is_finite(copied["parts"].get("agent")), "file": path.name}

        def write() -> None:
            try:
                self._write(path, copied, about, every, on_saved)
            except (StoreError, OSError) as error:
                if on_failure == "raise":
                    raise
                logger.warning("checkpoint not written: %s", error)

        size = sum(leaf.nbytes for _, leaf in leaves(copied) if isinstance(leaf, torch.Tensor | Shard))
        with self._surface():
            self._writer().submit(write, size)
        return path

    def flush(self) -> None:
        """Wait until every checkpoint is safe on the disk. Raises CheckpointError if a write failed."""
        for writer in self._writers:
            with self._surface():
                writer.wait()

    def check(self) -> None:
        """Raise CheckpointError if a write failed, without waiting."""
        for writer in self._writers:
            with self._surface():
                writer.check()

    def close(self) -> None:
        """Flush and end the thread. The next `take` starts a new one. Raises CheckpointError if a write failed."""
        while self._writers:
            atexit.unregister(self._writers[0].close)
            with self._surface():
                self._writers.pop().close()

    def newer(self, than: Order) -> list[Path]:
        """Return the checkpoints that are newer than `than`, and the damaged ones."""
        every = [path for folder in (self.folder, inside(self.folder, BEST)) for path in saved_files(folder)]
        return [path for path in every if order(look(path)) > than]

    def rows_of(self, checkpoints: Iterable[Path]) -> list[Path]:
        """Return the row files that the checkpoints list."""
        return self._shards.paths(map(look, checkpoints))

    def newest(self) -> Checkpoint | None:
        """Return the newest undamaged checkpoint, or None if there is none. Damaged ones are logged and skipped."""
        return next(self.good(), None)

    def good(self) -> Iterator[Checkpoint]:
        """Yield all undamaged checkpoints, newest first. Damaged ones are logged and skipped."""
        self.flush()
        for _, path in sorted(((order(look(path)), path) for path in saved_files(self.folder)), reverse=True):
            try:
                yield read_checkpoint(path)
            except CheckpointError as error:
                logger.warning("%s; skipping this checkpoint", error)

    def _writer(self) -> WriterThread:
        if not self._writers:
            try:
                make_folder(self.folder)
                for folder in (self.folder.parent, self.folder):
                    sync_folder(folder)
            except OSError as error:
                raise CheckpointError(f"{self.folder}: cannot be created: {error.strerror} ({error.errno})") from error
            self._writers.append(WriterThread(_WAITING))
            atexit.register(self._writers[0].close)  # queued checkpoints are written at exit
        return self._writers[0]

    def _write(
        self,
        path: Path,
        state: Any,
        about: dict[str, Any],
        rules: Sequence[Rules],
        on_saved: Callable[[Path], None] | None,
    ) -> None:
        """Write one checkpoint, update `best/` and `latest`, and remove old files. Runs on the writer's thread."""
        try:
            if names := self._shards.write(state):
                about["rows"] = names
            write_checkpoint(path, state, about)
        except BaseException:
            self._shards.forget()
            raise
        self._written[path] = about
        if wanted := {one.best for one in rules if one.best is not None}:
            self._keep_best(path.name, state, about, sorted(wanted))
        write_whole(self.folder / LATEST, f"{path.name}\n".encode())
        for old in superfluous(self._written, rules):
            old.unlink(missing_ok=True)
            del self._written[old]
        self._clean_rows()
        if on_saved is not None:
            on_saved(path)

    def _clean_rows(self) -> None:
        """Remove the row files that no checkpoint lists. Removes nothing if a checkpoint cannot be read."""
        best = map(look, saved_files(inside(self.folder, BEST)))
        abouts = [*self._written.values(), *self._others, *best]
        if None not in abouts:
            self._shards.clean(names_of(abouts))

    def _keep_best(self, name: str, state: Any, about: dict[str, Any], wanted: Sequence[Best]) -> None:
        """Also write the checkpoint to `best/` if it is the best so far by a metric, and remove those that it replaces.

        Each file lists the metrics for which it is kept. It stays until it is no longer best by any of them.
        """
        folder = inside(self.folder, BEST)
        abouts = {path: look(path) or {} for path in saved_files(folder)}
        written = {path: saved for path, saved in abouts.items() if metrics_of(path, saved)}
        same = next((path for path, saved in written.items() if order(saved) == order(about)), None)
        others = {path: saved for path, saved in written.items() if path != same}
        values = {best: others[path] for best, path in holders(others).items()}
        won = [best for best in wanted if about["finite"] and beats(about, values.get(best, {}), best)]
        if not won:
            return
        before = [best for best in metrics_of(same, written[same]) if best not in wanted] if same is not None else []
        if not folder.is_dir():
            folder.mkdir()
            sync_folder(self.folder)
        lost = {path for path in others if {*metrics_of(path, others[path])} <= {*won}}
        target = same or _free(folder / name, lost)
        about = {**about, "file": target.name, "best": [list(best) for best in (*before, *won)]}
        write_checkpoint(target, state, about)
        written[target] = about
        for path in written.keys() - {*holders(written).values()}:
            path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _surface(self) -> Iterator[None]:
        """Raise a failure of the writer once, as CheckpointError. The next checkpoint starts a new writer."""
        try:
            yield
        except CheckpointError:
            self._writers.clear()
            raise
        except StoreError as error:
            self._writers.clear()
            raise CheckpointError(str(error)) from error


def order_of(loop: Loop) -> Order:
    """Return the finished iterations and epochs of a loop."""
    return loop.state.total_iterations, loop.state.clocks.epochs


def stem_of(loop: Loop) -> str:
    """Return the checkpoint name of a loop's present state: `epoch-000100` or `epoch-000101-iteration-000017`."""
    state = loop.state
    if not state.epoch_open:
        return f"epoch-{state.clocks.epochs:06d}"
    return f"epoch-{state.epoch:06d}-iteration-{state.iteration:06d}"


def saved_files(folder: Path) -> list[Path]:
    """Return the finished checkpoints in a folder, sorted by name. Returns an empty list if the folder is missing."""
    return sorted(path for path in folder.glob("*.h5") if path.name[0] != ".") if folder.is_dir() else []


def _free(path: Path, replaced: set[Path]) -> Path:
    """Return the first of `path`, `path-2`, `path-3`, ... that does not exist or is in `replaced`."""
    names = itertools.chain([path], (path.with_stem(f"{path.stem}-{number}") for number in itertools.count(2)))
    return next(name for name in names if name in replaced or not os.path.lexists(name))


def _end(writers: list[WriterThread]) -> None:
    for writer in writers:
        if writer.works:
            writer.submit(functools.partial(atexit.unregister, writer.close), 0, wait=False)
        writer.end()


class Rules(NamedTuple):
    """Retention rules of one handler.

    A file stays if a rule of any handler keeps it, or if it is the newest checkpoint with finite parameters.
    """

    last: int | None = None  # number of newest checkpoints to keep; None keeps all
    every: int | None = None  # keep the checkpoints after every n-th epoch
    best: Best | None = None  # keep the best checkpoint by this metric in `best/`


def superfluous(abouts: Mapping[Path, Mapping[str, Any]], rules: Sequence[Rules]) -> list[Path]:
    """Return the checkpoints that no rule keeps, by their descriptions.

    Without rules, these are all but the newest of those that were saved without rules.
    """
    if not rules:
        ends = [path for path, about in abouts.items() if about.get("at_end") is True]
        return sorted(ends, key=lambda path: order(abouts[path]))[:-1]
    if any(one.last is None for one in rules):
        return []
    newest_first = sorted(abouts, reverse=True, key=lambda path: (order(abouts[path]), path))
    stay = {*newest_first[: max(one.last or 0 for one in rules)]}
    stay |= {*[path for path in newest_first if abouts[path].get("finite")][:1]}
    for every in {one.every for one in rules if one.every}:
        stay |= {path for path in newest_first if _ends_multiple(abouts[path], every)}
    return [path for path in newest_first if path not in stay]


def is_own(path: Path, about: Mapping[str, Any]) -> bool:
    """Return whether rein wrote this file under this name. rein removes no other files."""
    return about.get("file") == path.name


def metrics_of(path: Path, about: Mapping[str, Any]) -> list[Best]:
    """Return the metrics for which rein keeps a file in `best/`. Returns an empty list for the user's own files."""
    listed = about.get("best")
    if not is_own(path, about) or not isinstance(listed, list):
        return []
    pairs = [tuple(one) for one in listed if isinstance(one, list) and len(one) == 2]
    return [(str(metric), mode) for metric, mode in pairs if mode in ("min", "max")]


def holders(saved: Mapping[Path, Mapping[str, Any]]) -> dict[Best, Path]:
    """Return the file with the best value of each metric for which files are kept. The oldest file wins ties."""
    best_files: dict[Best, Path] = {}
    for path, about in sorted(saved.items(), key=lambda item: order(item[1])):
        for best in metrics_of(path, about):
            if best not in best_files or beats(about, saved[best_files[best]], best):
                best_files[best] = path
    return best_files


def beats(about: Mapping[str, Any], other: Mapping[str, Any], best: Best) -> bool:
    """Return whether `about` is better than `other` by a metric. NaN is never better."""
    value, before = value_of(about, best[0]), value_of(other, best[0])
    return not math.isnan(value) and (math.isnan(before) or (value > before if best[1] == "max" else value < before))


def order(about: Mapping[str, Any] | None) -> Order:
    """Return the sort key of a checkpoint by its description.

    Damaged files sort last, so that they are read first and reported. Parts written by `rein.save` sort first.
    """
    if about is not None and about.get("kind") == "part":
        return -1, -1
    try:
        return int((about or {})["total_iterations"]), int((about or {})["epochs_ended"])
    except (KeyError, TypeError, ValueError):
        return sys.maxsize, sys.maxsize


def value_of(about: Mapping[str, Any], metric: str) -> float:
    """Return the value of a metric when the checkpoint was taken, or NaN if it is missing."""
    metrics = about.get("metrics")
    value = metrics.get(metric) if isinstance(metrics, dict) else None
    return float(value) if isinstance(value, int | float) else math.nan


def _ends_multiple(about: Mapping[str, Any], every: int) -> bool:
    return not about.get("epoch_open") and about.get("epochs_ended", 1) % every == 0
