"""Checkpoints of a run: written by a thread, kept by rules of retention, and read from the newest good one backwards.

checkpoints/epoch-000100.h5                     after epoch 100
checkpoints/epoch-000101-iteration-000017.h5    in the middle of epoch 101
checkpoints/best/epoch-000040.h5                the best one by one or several metrics, which the file names
checkpoints/rows/<sha256>.h5                    rows of replay buffers that checkpoints list, see `rein.store.shards`
checkpoints/latest                              the name of the newest one
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
from rein.files import absolute, inside
from rein.loop import Loop
from rein.ops.trees import leaves
from rein.store.checkpoint_file import (
    Checkpoint,
    describe,
    is_finite,
    look,
    read_checkpoint,
    write_checkpoint,
)
from rein.store.folder import move_aside
from rein.store.format.sealed import Memory, remove_leftovers, sync_folder, write_whole
from rein.store.format.state import Shard, snapshot
from rein.store.shards import BEST, Shards, names_of
from rein.store.writer_thread import Writer

FOLDER = "checkpoints"
LATEST = "latest"

Order = tuple[int, int]  # finished iterations and epochs: how far a run was
Best = tuple[str, Literal["min", "max"]]  # a metric, and whether its smallest or largest value is best

_WAITING = 256 << 20  # bytes that may wait for the disk before training waits too

logger = logging.getLogger(__name__)


class Checkpoints:
    """A folder of checkpoints. `take` copies a loop's state and returns; a thread writes it, whole or not at all.

    What `flush` returned from is safe. The folder is made by the first checkpoint. Only files that rein wrote are
    removed: a file of the user's, or a copy under another name, stays.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = absolute(folder)
        self.shared: weakref.WeakKeyDictionary[Loop, Any] = weakref.WeakKeyDictionary()  # by handlers of one loop
        self._kept: list[Kept] = []  # those that rein wrote
        self._others: list[dict[str, Any]] = []  # the descriptions of those that the user put here
        self._shards = Shards(self.folder)
        self._memory = Memory()
        self._writers: list[Writer] = []  # none or one; a list, so that the finalizer need not hold this object
        self._finalizer = weakref.finalize(self, _end, self._writers)

    def begin(self, loop: Loop) -> None:
        """A run goes on from where `loop` stands: newer checkpoints of another one are moved to `aside/`.

        Removes what dead processes left. Raises CheckpointError where the folder cannot be read or changed.
        """
        self.flush()
        try:
            for folder in (self.folder, inside(self.folder, BEST)):
                remove_leftovers(folder)
            self._shards.remove_leftovers()
            run = self.folder.parent if self.folder.name == FOLDER else self.folder
            newer = self.newer(order_of(loop))
            move_aside(run, newer, stem_of(loop), shared=self.rows_of(newer))
            there = {path: about for path in saved_files(self.folder) if (about := look(path))}
            own = {path for path, about in there.items() if is_own(path, about) and "best" not in about}
            self._kept = [Kept(order(there[path]), path, there[path]) for path in own]
            self._others = [about for path, about in there.items() if path not in own]
            self._clean_rows()
        except (OSError, StoreError) as error:
            raise CheckpointError(f"{self.folder}: cannot be prepared: {error}") from error

    def take(
        self,
        loop: Loop,
        rules: Mapping[str, Any] | Sequence[Mapping[str, Any]],
        stem: str | None = None,
        on_failure: Literal["raise", "warn"] = "raise",
    ) -> Path:
        """Copy the state of `loop` and have it written to `<stem>.h5`. Returns that path.

        `rules` are the fields of `Rules` by name, of one handler or of several. A rule has `best` only if the metric
        was assigned to this state. Waits for the copy, and for the disk if too much waits to be written. Raises
        CheckpointError if an earlier write failed.
        """
        every = [Rules(**one) for one in ([rules] if isinstance(rules, Mapping) else rules)]
        stem = stem_of(loop) if stem is None else stem
        if not stem or "/" in stem or stem[0] == ".":
            raise ValueError(f"the name of a checkpoint is {stem!r}: give text without '/', and not '.' first")
        state = loop.state_dict()
        about = describe(loop)
        held = snapshot(state, self._shards.hold)
        about["finite"] = is_finite(held["parts"].get("agent"))
        path = self.folder / f"{stem}.h5"
        about["file"] = path.name
        write = functools.partial(self._write, path, held, about, every)
        job = write if on_failure == "raise" else functools.partial(_warn_of, write)
        with self._surface():
            self._writer().submit(job, _size(held))
        return path

    def flush(self) -> None:
        """Return when everything taken is safe. Raises CheckpointError if something could not be written."""
        for writer in self._writers:
            with self._surface():
                writer.wait()

    def check(self) -> None:
        """Raise CheckpointError if a write failed; does not wait."""
        for writer in self._writers:
            with self._surface():
                writer.check()

    def close(self) -> None:
        """Flush and end the thread; another `take` begins a new one. Raises CheckpointError as `flush` does."""
        self._memory = Memory()
        while self._writers:
            atexit.unregister(self._writers[0].close)
            with self._surface():
                self._writers.pop().close()

    def newer(self, than: Order) -> list[Path]:
        """The files of runs that were further than that, and those too damaged to say."""
        every = [path for folder in (self.folder, inside(self.folder, BEST)) for path in saved_files(folder)]
        return [path for path in every if order(look(path)) > than]

    def rows_of(self, checkpoints: Iterable[Path]) -> list[Path]:
        """The files of rows that some of them list."""
        return self._shards.paths(map(look, checkpoints))

    def newest(self) -> Checkpoint | None:
        """The newest checkpoint that is whole; damaged ones before it are reported. None where there is none."""
        return next(self.good(), None)

    def good(self) -> Iterator[Checkpoint]:
        """All checkpoints that are whole, the newest first; damaged ones are reported and passed over."""
        self.flush()
        for _, path in sorted(((order(look(path)), path) for path in saved_files(self.folder)), reverse=True):
            try:
                yield read_checkpoint(path)
            except CheckpointError as error:
                logger.warning("%s; the checkpoint before it is used", error)

    def _writer(self) -> Writer:
        if not self._writers:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                for folder in (self.folder.parent, self.folder):
                    sync_folder(folder)
            except OSError as error:
                raise CheckpointError(f"{self.folder}: cannot be made: {error.strerror} ({error.errno})") from error
            self._writers.append(Writer(_WAITING, _nothing, interval=3600.0))
            atexit.register(self._writers[0].close)  # what nobody waited for is not lost
        return self._writers[0]

    def _write(self, path: Path, held: Any, about: dict[str, Any], rules: Sequence[Rules]) -> None:
        """Write one checkpoint and whatever follows from it; on the writer's thread."""
        try:
            if names := self._shards.write(held, self._memory):
                about["rows"] = names
            write_checkpoint(path, held, about, self._memory)
        except BaseException:  # raised again
            self._shards.forget()
            raise
        self._kept = [kept for kept in self._kept if kept.path != path]
        self._kept.append(Kept(order(about), path, about))
        if wanted := {one.best for one in rules if one.best is not None}:
            self._keep_best(path.name, held, about, sorted(wanted))
        write_whole(self.folder / LATEST, f"{path.name}\n".encode())
        for kept in superfluous(self._kept, rules):
            with contextlib.suppress(FileNotFoundError):
                kept.path.unlink()
            self._kept.remove(kept)
        self._clean_rows()

    def _clean_rows(self) -> None:
        """Remove the rows that no checkpoint lists any more; none, where one does not say what it lists."""
        best = map(look, saved_files(inside(self.folder, BEST)))
        abouts = [*(kept.about for kept in self._kept), *self._others, *best]
        if None not in abouts:
            self._shards.clean(names_of(abouts))

    def _keep_best(self, name: str, held: Any, about: dict[str, Any], wanted: Sequence[Best]) -> None:
        """Write the checkpoint to `best/` too if it is the best so far by a metric, and remove those that it replaces.

        Each file lists the metrics for which it is kept, so that a file stays as long as it is best by one of them.
        """
        folder = inside(self.folder, BEST)
        found = {path: look(path) or {} for path in saved_files(folder)}
        own = {path: there for path, there in found.items() if metrics_of(path, there)}
        mine = next((path for path, there in own.items() if order(there) == order(about)), None)  # of the same place
        others = {path: there for path, there in own.items() if path != mine}
        values = {best: others[path] for best, path in holders(others).items()}
        won = [best for best in wanted if about["finite"] and beats(about, values.get(best, {}), best)]
        if not won:
            return
        before = [best for best in metrics_of(mine, own[mine]) if best not in wanted] if mine is not None else []
        if not folder.is_dir():
            folder.mkdir()
            sync_folder(self.folder)
        lost = {path for path in others if set(metrics_of(path, others[path])) <= {*won}}
        target = mine or _free(folder / name, lost)
        about = {**about, "file": target.name, "best": [list(best) for best in (*before, *won)]}
        write_checkpoint(target, held, about, self._memory)
        own[target] = about
        for path in own.keys() - set(holders(own).values()):
            path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _surface(self) -> Iterator[None]:
        """Tell a failure of the writer once, as what it was; the next checkpoint has a writer of its own again."""
        try:
            yield
        except CheckpointError:
            self._writers.clear()
            raise
        except StoreError as error:
            self._writers.clear()
            raise CheckpointError(str(error)) from error


def order_of(loop: Loop) -> Order:
    """How far the run of a loop is."""
    return loop.state.total_iterations, loop.state.clocks.epochs


def stem_of(loop: Loop) -> str:
    """The name of a checkpoint of the loop as it stands now: `epoch-000100`, `epoch-000101-iteration-000017`."""
    state = loop.state
    if not state.epoch_open:
        return f"epoch-{state.clocks.epochs:06d}"
    return f"epoch-{state.epoch:06d}-iteration-{state.iteration:06d}"


def saved_files(folder: Path) -> list[Path]:
    """The finished checkpoints in a folder, by name; none where there is no folder."""
    return sorted(path for path in folder.glob("*.h5") if path.name[0] != ".") if folder.is_dir() else []


def _free(path: Path, replaced: set[Path]) -> Path:
    """Return `path`, or with a number the first name that is neither taken nor of a file that is replaced."""
    names = itertools.chain([path], (path.with_stem(f"{path.stem}-{number}") for number in itertools.count(2)))
    return next(name for name in names if name in replaced or not os.path.lexists(name))


def _size(tree: Any) -> int:
    return sum(leaf.nbytes for _, leaf in leaves(tree) if isinstance(leaf, torch.Tensor | Shard))


def _warn_of(write: Callable[[], None]) -> None:
    try:
        write()
    except (StoreError, OSError) as error:
        logger.warning("no checkpoint was written: %s", error)


def _nothing() -> None:
    """What the writer's thread does when there is no work."""


def _end(writers: list[Writer]) -> None:
    for writer in writers:
        if writer.works:
            writer.submit(functools.partial(atexit.unregister, writer.close), 0, wait=False)
        writer.end()


class Rules(NamedTuple):
    """Rules of one handler. A file stays if any rule of any handler keeps it, or if it is the newest finite one."""

    last: int | None = None  # the newest so many; None keeps all
    every: int | None = None  # those after each so many epochs
    best: Best | None = None  # the best one by that metric, kept in a folder of its own


class Kept(NamedTuple):
    """A checkpoint that is there."""

    order: Order
    path: Path
    about: dict[str, Any]


def superfluous(there: Sequence[Kept], rules: Sequence[Rules]) -> list[Kept]:
    """Return the checkpoints that no rule keeps."""
    if any(one.last is None for one in rules):
        return []
    newest_first = sorted(there, reverse=True, key=lambda kept: kept.order)
    stay = {kept.path for kept in newest_first[: max(one.last or 0 for one in rules)]}
    stay |= {kept.path for kept in [kept for kept in newest_first if kept.about.get("finite")][:1]}
    for every in {one.every for one in rules if one.every}:
        stay |= {kept.path for kept in newest_first if _ends_multiple(kept.about, every)}
    return [kept for kept in newest_first if kept.path not in stay]


def is_own(path: Path, about: Mapping[str, Any]) -> bool:
    """Return whether rein wrote this file under this name. Only such files are ever removed."""
    return about.get("file") == path.name


def metrics_of(path: Path, about: Mapping[str, Any]) -> list[Best]:
    """Return the metrics for which rein keeps a file among the best; none for a file of the user's."""
    listed = about.get("best")
    if not is_own(path, about) or not isinstance(listed, list):
        return []
    pairs = [tuple(one) for one in listed if isinstance(one, list) and len(one) == 2]
    return [(str(metric), mode) for metric, mode in pairs if mode in ("min", "max")]


def holders(there: Mapping[Path, Mapping[str, Any]]) -> dict[Best, Path]:
    """Return the file that holds the best value of each metric for which files are kept; of equal ones the first."""
    found: dict[Best, Path] = {}
    for path, about in sorted(there.items(), key=lambda item: order(item[1])):
        for best in metrics_of(path, about):
            if best not in found or beats(about, there[found[best]], best):
                found[best] = path
    return found


def beats(about: Mapping[str, Any], other: Mapping[str, Any], best: Best) -> bool:
    """Return whether one checkpoint is better than another one by a metric. A NaN is never better."""
    value, before = value_of(about, best[0]), value_of(other, best[0])
    return not math.isnan(value) and (math.isnan(before) or (value > before if best[1] == "max" else value < before))


def order(about: Mapping[str, Any] | None) -> Order:
    """Return how far the run was. A damaged file comes last, so that it is reported; a part of `rein.save` first."""
    if about is not None and about.get("kind") == "part":
        return -1, -1
    try:
        return int((about or {})["total_iterations"]), int((about or {})["epochs_ended"])
    except (KeyError, TypeError, ValueError):
        return sys.maxsize, sys.maxsize


def value_of(about: Mapping[str, Any], metric: str) -> float:
    """Return the value of a metric when a checkpoint was taken; NaN without."""
    metrics = about.get("metrics")
    value = metrics.get(metric) if isinstance(metrics, dict) else None
    return float(value) if isinstance(value, int | float) else math.nan


def _ends_multiple(about: dict[str, Any], every: int) -> bool:
    return not about.get("epoch_open") and about.get("epochs_ended", 1) % every == 0
