"""Which checkpoint a path means: a file, or the newest good one of a folder."""

from __future__ import annotations

from pathlib import Path

from rein.errors import CheckpointError
from rein.files import absolute, inside
from rein.store.checkpoint import Checkpoint, look, read_checkpoint
from rein.store.checkpoints import FOLDER, LATEST, Checkpoints, saved_files
from rein.store.columns import PLOT
from rein.store.format.files import USER_BLOCK
from rein.store.retention import holders
from rein.store.shards import BEST

_NAMED = 6  # of the files that are there, the newest so many


def find(path: str | Path) -> Checkpoint:
    """The checkpoint at `path`, read.

    `path` is a file, or the folder of a run, its `checkpoints` or its file `checkpoints/latest`: then the newest good
    checkpoint is read, and damaged ones before it are reported. In `checkpoints/best` it is the best checkpoint.

    Raises CheckpointError if there is none, if a folder holds only files of `rein.save`, if several files are best by
    different metrics, and if the file is damaged. The message names the files that are there.
    """
    if not str(path):
        raise CheckpointError("the path is empty: give a file or a run's folder")
    path = absolute(path)
    if path.is_file() and path.is_symlink() and path.name != LATEST:  # a link that the user named is followed
        path = path.resolve()
    folder = _folder(path)
    if folder is None:
        if not path.exists():
            raise CheckpointError(f"{path}: there is no checkpoint; {_there(path.parent)}")
        return read_checkpoint(path)
    if folder.name == BEST and (best := best_file(folder)):
        return read_checkpoint(best)
    newest = Checkpoints(folder).newest()
    if newest is None:
        files = _names(folder)
        why = f"that is whole, of {', '.join(files)}" if files else f"there; {_there(folder)}"
        raise CheckpointError(f"{path}: there is no checkpoint {why}")
    if newest.about.get("kind") == "part":  # of which none is the newest
        raise CheckpointError(f"{path}: is no run's folder; {_there(folder)}: name one of them")
    return newest


def best_file(folder: Path, metric: str | None = None) -> Path | None:
    """Return the file in `checkpoints/best` that rein keeps for a metric; None if rein keeps none for any.

    Raises CheckpointError for a metric without a file, and without `metric` if the metrics have different files.
    """
    there = {path: about for path in saved_files(folder) if (about := look(path))}
    held = holders(there)
    chosen = {path for (name, _), path in held.items() if metric in (None, name)}
    if len(chosen) == 1 or not held:
        return next(iter(chosen), None)
    told = ", ".join(f"{name} ({mode}): {path.name}" for (name, mode), path in sorted(held.items()))
    wrong = f"no file is best by {metric!r}" if not chosen else "several files are best"
    raise CheckpointError(f"{folder}: {wrong}; name one of these metrics, --best METRIC, or its file: {told}")


def _folder(path: Path) -> Path | None:
    """The folder whose newest checkpoint is meant; None where the path is that of one file."""
    if path.is_dir():
        return _checkpoints_of(path)
    names = path.name == LATEST and path.is_file() and path.stat().st_size < USER_BLOCK  # too short for a checkpoint
    return path.parent if names else None


def _there(folder: Path) -> str:
    """What there is in a folder, or in the nearest one around it that there is, in words."""
    while not folder.is_dir():  # the root and "." are folders
        folder = folder.parent
    inner = _checkpoints_of(folder)
    best = [f"{BEST}/{name}" for name in _names(inside(inner, BEST))]
    files = [*_names(inner), *best]
    if not files and inner.name == FOLDER and _is_run(inner.parent):
        return "the run has taken none yet: `checkpoint(loop, store)`, attached before it runs, has it take some"
    return f"in {inner} there {'is' if len(files) < 2 else 'are'} {', '.join(files) or 'none'}"


def _checkpoints_of(folder: Path) -> Path:
    """Where those of a folder lie; for a run that has taken none, where it would put them."""
    has_none = _is_run(folder) and not _names(folder)
    return inside(folder, FOLDER) if (folder / FOLDER).is_dir() or has_none else folder


def _is_run(folder: Path) -> bool:
    return (folder / "run.json").is_file()


def _names(folder: Path) -> list[str]:
    names = [path.name for path in saved_files(folder) if path.name != PLOT]
    return [*["..."] * (len(names) > _NAMED), *names[-_NAMED:]]
