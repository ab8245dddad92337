"""Find a checkpoint by its path, resume a run from it, load one part from it, and save one part to a file."""

from __future__ import annotations

import copy
import logging
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from rein.errors import CheckpointError
from rein.files import absolute, inside
from rein.loop import Loop
from rein.store.checkpoint_file import (
    Checkpoint,
    describe_part,
    describe_parts,
    differences,
    look,
    read_checkpoint,
    versions,
    write_checkpoint,
)
from rein.store.checkpoint_folder import FOLDER, LATEST, Checkpoints, holders, order, saved_files
from rein.store.folder import move_aside, newer_files
from rein.store.format.sealed import USER_BLOCK
from rein.store.hdf5 import HDF5Store
from rein.store.metrics import PLOT, evaluations_of, newer_rows
from rein.store.shards import BEST
from rein.store.spaces import describe_build

_NAMED = 6  # of the files that are there, the newest so many

logger = logging.getLogger(__name__)


def resume(loop: Loop, path: str | Path, *, strict: bool = True) -> Checkpoint:
    """Put `loop`, composed as it was, where a checkpoint was taken; `loop.run()` then finishes that run.

        loop = rein.training_loop(agent, environment, rein.HDF5Store("runs/mine", exist="resume"))
        checkpoint(loop, loop.parts["store"])
        rein.resume(loop, "runs/mine")
        loop.run(epochs=1000)

    `path` is what `rein.load` takes: the folder of a run or of checkpoints, of which the newest good one is taken, or
    one checkpoint. What the run's folder holds that is newer is moved to `aside/`. With `strict=False` the parts that
    fit are loaded, and what was left is logged. Returns the checkpoint.

    Raises CheckpointError where there is none, where it is damaged (and named itself), and, with `strict`, where it is
    of another configuration: the differences are listed.
    """
    loop.check_idle("resume")
    found = find(path)
    theirs, mine = found.about.get("parts"), describe_parts(loop.parts)
    if strict and (differ := differences(theirs, mine, by_chance=loop.by_chance)):
        advice = "rein.resume(..., strict=False) loads what fits"
        raise CheckpointError(f"{found.path}: is of another configuration: {'; '.join(differ)}; {advice}")
    _warn_of_versions(found)
    _set_aside(loop, found)
    try:
        left = loop.load_state_dict(found.state, strict)
    except (ValueError, TypeError, KeyError, RuntimeError, AttributeError, IndexError) as error:
        raise CheckpointError(f"{found.path}: does not fit this loop: {error}{_notes(error)}") from error
    for line in left:
        logger.warning("%s: was left: %s", found.path, line)
    return found


def _set_aside(loop: Loop, found: Checkpoint) -> None:
    """All that is newer, rows of metrics too, where this loop writes to the run that the checkpoint is of."""
    for name, part in loop.parts.items():
        if isinstance(part, HDF5Store) and part.path.resolve() in found.path.resolve().parents:
            parts: Any = found.state.get("parts")
            saved = parts.get(name) if isinstance(parts, dict) else None
            if isinstance(saved, dict) and type(saved.get("epoch")) is int:
                part.flush()
                files, rows = newer_rows(part.path, order(found.about)[1], evaluations_of(found.state.get("memory")))
                newer = part.checkpoints.newer(order(found.about))
                files += [*newer_files(part.path, saved["epoch"]), *newer]
                move_aside(part.path, files, found.path.stem, rows, part.checkpoints.rows_of(newer))


def _warn_of_versions(found: Checkpoint) -> None:
    said = found.about.get("versions")
    then = {**(said if isinstance(said, dict) else {}), "threads": found.about.get("threads")}
    now = {**versions(), "threads": torch.get_num_threads()}
    if differ := differences(then, now):
        logger.warning("%s: %s; the run may differ in the last bits from one without a break", found.path, differ)


def _notes(error: BaseException) -> str:
    return "".join(f" ({note})" for note in getattr(error, "__notes__", []))


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


def save(part: Any, path: str | Path) -> None:
    """Write one part, an agent say, to a file of its own, with all that it holds, the rows of its replay too.

    Raises CheckpointError where that cannot be done, TypeError for a policy, whose weights are its agent's.
    """
    if hasattr(part, "select_action") and not hasattr(part, "optimize_model"):
        raise TypeError(f"save({type(part).__name__}): a policy shares the weights of its agent: save the agent")
    about = {"kind": "part", "versions": versions(), **describe_part(part), "build": describe_build(part)}
    write_checkpoint(absolute(path), part.state_dict(), about)


def load(
    part: Any, path: str | Path, *, name: str = "agent", only: Collection[str] | None = None, strict: bool = True
) -> None:
    """Load what `save` wrote, or the part called `name` of a run's checkpoint, into `part`.

        rein.load(agent, "runs/mine")                         # the newest checkpoint of a run
        rein.load(agent, "runs/mine/checkpoints/best")        # the best one that was kept
        rein.load(agent, "agent.h5")                          # a file

    `only` takes these entries of the state and leaves the rest as it is, for a warm start: `only=["networks"]` loads
    the weights; counts, optimizer and generator begin anew. With `strict` another configuration is refused. What was
    loaded stays when a loop seeds an agent that was built without a seed; what was not is of the agent as it was built.

    Raises CheckpointError where the file is missing, and then names those that are there; where it is damaged, is of
    another configuration, or does not fit.
    """
    put(part, part_at(path, name), only=only, strict=strict)


@torch.inference_mode(False)
def put(part: Any, found: Checkpoint, *, only: Collection[str] | None = None, strict: bool = True) -> None:
    """Load what `part_at` read into `part`, as `load` does."""
    path, state, about = found
    differ = differences({"config": about.get("config")}, {"config": describe_part(part)["config"]})
    differ = [
        line for line in differ if not line.startswith("config.seed ")
    ]  # what it draws comes from the file anyway
    if strict and only is None and differ:
        raise CheckpointError(
            f"{path}: is of another configuration: {'; '.join(differ)}; strict=False tries all the same"
        )
    before, loaded = copy.deepcopy(part.state_dict()), getattr(part, "loaded", None)
    if only is not None:
        chosen = [only] if isinstance(only, str) else only
        state = {**before, **{entry: _entry(state, entry, path) for entry in chosen}}
    try:
        part.load_state_dict(state)
    except (ValueError, TypeError, KeyError, RuntimeError, AttributeError, IndexError) as error:
        part.load_state_dict(before)  # what did fit is taken back
        if loaded is not None:
            part.loaded = loaded
        raise CheckpointError(f"{path}: does not fit {type(part).__name__}: {error}") from error


def part_at(path: str | Path, name: str = "agent") -> Checkpoint:
    """The state of a part and what is said about it: of a file of its own, or of that name in a run's checkpoint."""
    path, state, about = find(path)
    if about.get("kind") != "part":
        builds, parts = about.get("builds"), _entry(about, "parts", path)
        state, about = _entry(_entry(state, "parts", path), name, path), _entry(parts, name, path)
        about = {**about, "build": builds.get(name) if isinstance(builds, Mapping) else None}
    return Checkpoint(path, state, about)


def _entry(mapping: Any, name: str, path: Path) -> Any:
    if not isinstance(mapping, Mapping) or name not in mapping:
        there = ", ".join(mapping) if isinstance(mapping, Mapping) else "none"
        raise CheckpointError(f"{path}: has no {name!r}; there are: {there or 'none'}")
    return mapping[name]
