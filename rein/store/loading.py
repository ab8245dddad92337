"""Find a checkpoint by its path, resume a run from it, load one part from it, and save one part to a file."""

from __future__ import annotations

import copy
import logging
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, overload

import torch

from rein.errors import CheckpointError, NonFiniteError
from rein.files import absolute, followed, inside
from rein.loop import Loop
from rein.networks.finite_parameters import check_parameters
from rein.spaces.space_json import describe_build
from rein.store.checkpoint_file import (
    BEST,
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
from rein.store.metrics_files import PLOT, evaluations_of, newer_rows

_NAMED = 6  # number of files that an error message lists, the newest ones

logger = logging.getLogger(__name__)


@overload
def resume(loop: Loop, path: str | Path, *, strict: bool = True) -> Checkpoint: ...
@overload
def resume(loop: Loop, path: None = None, *, strict: bool = True) -> Checkpoint | None: ...
def resume(loop: Loop, path: str | Path | None = None, *, strict: bool = True) -> Checkpoint | None:
    """Restore the state of `loop` from a checkpoint. `loop.run()` then continues that run.

    `loop` must have the same parts as the loop that wrote the checkpoint. Files of the run that are newer than the
    checkpoint are moved to `aside/`.

    Example::

        loop = rein.training_loop(agent, environment, rein.HDF5Store("runs/mine", exist="resume"))
        checkpoint(loop)
        rein.resume(loop)
        loop.run(epochs=1000)

    Args:
        loop: loop that is not running.
        path: checkpoint file, or folder of a run or of checkpoints, whose newest undamaged checkpoint is used. By
            default the run folder of the loop's store.
        strict: raise if the configuration differs. If False, load the parts that fit and log the others.

    Returns:
        The checkpoint that was loaded. None if no `path` is given and the store has no checkpoint yet, so that one
        script can start a run and resume it.

    Raises:
        CheckpointError: no checkpoint exists at `path`, the file is damaged, or its configuration differs. The message
            lists the differences.
        TypeError: no `path` is given and the loop has no HDF5Store.
        ValueError: no `path` is given and the store was not opened with `exist="resume"`.
    """
    loop.check_idle("resume")
    path = _checkpoints_in_store(loop) if path is None else path
    if path is None:
        return None
    saved = find(path)
    theirs = saved.about.get("parts")
    if strict and (differ := differences(theirs, describe_parts(loop.parts), by_chance=loop.by_chance)):
        advice = "rein.resume(..., strict=False) loads what fits"
        raise CheckpointError(f"{saved.path}: has another configuration: {'; '.join(differ)}; {advice}")
    _warn_of_versions(saved)
    _set_aside(loop, saved)
    try:
        left = loop.load_state_dict(saved.state, strict)
    except (ValueError, TypeError, KeyError, RuntimeError, AttributeError, IndexError) as error:
        raise CheckpointError(f"{saved.path}: does not fit this loop: {error}{_notes(error)}") from error
    omitted = saved.about.get("omitted")
    for line in (*(omitted if isinstance(omitted, list) else ()), *left):
        logger.warning("%s: not loaded: %s", saved.path, line)
    return saved


def _checkpoints_in_store(loop: Loop) -> Path | None:
    """Return the folder of the checkpoints of the loop's store, or None if it has none yet."""
    store = loop.parts.get("store")
    if not isinstance(store, HDF5Store):
        raise TypeError("resume(loop): the loop has no HDF5Store; give the path of the run")
    if store.config["exist"] != "resume":
        raise ValueError(
            f'resume(loop): the store has a new folder, {store.path}; open the run with HDF5Store(path, "resume")'
        )
    return store.checkpoints.folder if saved_files(store.checkpoints.folder) else None


def _set_aside(loop: Loop, saved: Checkpoint) -> None:
    """Move aside newer files and rows of metrics if this loop writes to the folder of the checkpoint's run."""
    parts = saved.state.get("parts")
    for name, part in loop.parts.items():
        if isinstance(part, HDF5Store) and part.path.resolve() in saved.path.resolve().parents:
            state = parts.get(name) if isinstance(parts, dict) else None
            if isinstance(state, dict) and type(state.get("epoch")) is int:
                part.flush()
                files, rows = newer_rows(part.path, order(saved.about)[1], evaluations_of(saved.state.get("memory")))
                newer = part.checkpoints.newer(order(saved.about))
                files += [*newer_files(part.path, state["epoch"]), *newer]
                move_aside(part.path, files, saved.path.stem, rows, part.checkpoints.rows_of(newer))


def _warn_of_versions(saved: Checkpoint) -> None:
    before = saved.about.get("versions")
    then = {**(before if isinstance(before, dict) else {}), "threads": saved.about.get("threads")}
    now = {**versions(), "threads": torch.get_num_threads()}
    if differ := differences(then, now):
        logger.warning("%s: %s; results may differ in the last bits from an uninterrupted run", saved.path, differ)


def _notes(error: BaseException) -> str:
    return "".join(f" ({note})" for note in getattr(error, "__notes__", []))


def find(path: str | Path) -> Checkpoint:
    """Find and read the checkpoint at `path`.

    `path` is a checkpoint file, the folder of a run, its folder `checkpoints` or its file `checkpoints/latest`. From a
    run, the newest undamaged checkpoint is read; damaged ones are logged and skipped. From `checkpoints/best`, the best
    checkpoint is read.

    Raises CheckpointError if no checkpoint exists, or if the file is damaged. Also raises it if a folder holds only
    files of `rein.save`, or several best files for different metrics. The message lists the existing files.
    """
    if not str(path):
        raise CheckpointError("the path is empty: give a checkpoint file or the folder of a run")
    path = absolute(path)
    path = path if path.name == LATEST else followed(path)
    folder = _folder(path)
    if folder is None:
        if not path.exists():
            raise CheckpointError(f"{path}: no checkpoint; {_list_files(path.parent)}")
        return read_checkpoint(path)
    if folder.name == BEST and (best := best_file(folder)):
        return read_checkpoint(best)
    newest = Checkpoints(folder).newest()
    if newest is None:
        files = _names(folder)
        reason = f"all are damaged: {', '.join(files)}" if files else _list_files(folder)
        raise CheckpointError(f"{path}: no checkpoint; {reason}")
    if newest.about.get("kind") == "part":  # files of `rein.save` have no order
        raise CheckpointError(f"{path}: is not the folder of a run; {_list_files(folder)}: name one of them")
    return newest


def best_file(folder: Path, metric: str | None = None) -> Path | None:
    """Return the file in `checkpoints/best` for a metric, or None if the folder holds no best checkpoints.

    Raises CheckpointError if `metric` has no file, and if `metric` is None and the metrics have different files.
    """
    held = holders({path: about for path in saved_files(folder) if (about := look(path))})
    chosen = {path for (name, _), path in held.items() if metric in (None, name)}
    if len(chosen) == 1 or not held:
        return next(iter(chosen), None)
    files = ", ".join(f"{name} ({mode}): {path.name}" for (name, mode), path in sorted(held.items()))
    reason = f"no file is best by {metric!r}" if not chosen else "several files are best"
    raise CheckpointError(f"{folder}: {reason}; name one of these metrics with --best METRIC, or a file: {files}")


def _folder(path: Path) -> Path | None:
    """Return the folder to search for the newest checkpoint, or None if `path` is one checkpoint file."""
    if path.is_dir():
        return _checkpoints_of(path)
    names = path.name == LATEST and path.is_file() and path.stat().st_size < USER_BLOCK  # too short for a checkpoint
    return path.parent if names else None


def _list_files(folder: Path) -> str:
    """List the checkpoints in a folder, or in its nearest existing parent, for an error message."""
    while not folder.is_dir():
        folder = folder.parent
    inner = _checkpoints_of(folder)
    best = [f"{BEST}/{name}" for name in _names(inside(inner, BEST))]
    files = [*_names(inner), *best]
    if not files and inner.name == FOLDER and _is_run(inner.parent):
        return "the run has not ended yet, or it failed; `rein.checkpoint(loop)` before the run saves some during it"
    return f"{inner} has {', '.join(files) or 'none'}"


def _checkpoints_of(folder: Path) -> Path:
    """Return the folder that holds the checkpoints of `folder`: its subfolder if it is the folder of a run."""
    has_none = _is_run(folder) and not _names(folder)
    return inside(folder, FOLDER) if (folder / FOLDER).is_dir() or has_none else folder


def _is_run(folder: Path) -> bool:
    return (folder / "run.json").is_file()


def _names(folder: Path) -> list[str]:
    names = [path.name for path in saved_files(folder) if path.name != PLOT]
    return [*["..."] * (len(names) > _NAMED), *names[-_NAMED:]]


def save(part: Any, path: str | Path) -> None:
    """Save one part, such as an agent, to a file with its complete state, including replay buffers.

    Raises:
        CheckpointError: the state cannot be stored or the file cannot be written.
        NonFiniteError: a parameter is NaN or infinite.
        TypeError: `part` is a policy, which shares the weights of its agent.
    """
    if hasattr(part, "select_action") and not hasattr(part, "optimize_model"):
        raise TypeError(f"save({type(part).__name__}): a policy shares the weights of its agent; save the agent")
    check_parameters(part, "Nothing was saved; load an earlier checkpoint")
    about = {"kind": "part", "versions": versions(), **describe_part(part), "build": describe_build(part)}
    write_checkpoint(absolute(path), part.state_dict(), about)


def load(
    part: Any, path: str | Path, *, name: str = "agent", only: Collection[str] | None = None, strict: bool = True
) -> None:
    """Load the state of one part from a file of `save` or from a checkpoint of a run.

    Example::

        rein.load(agent, "runs/mine")                         # newest checkpoint of a run
        rein.load(agent, "runs/mine/checkpoints/best")        # best checkpoint
        rein.load(agent, "agent.h5")                          # file of rein.save

    If a loop later seeds an agent that was built without a seed, the loaded state is kept.

    Args:
        part: agent or other part with a `state_dict`.
        path: file of `save`, checkpoint file, or folder of a run or of checkpoints.
        name: name of the part in a run's checkpoint.
        only: entries of the state to load, for a warm start; the others stay as built. `only=["networks"]` loads the
            weights but no counts, optimizer or generator.
        strict: raise if the configuration differs.

    Raises:
        CheckpointError: the file is missing or damaged, its configuration differs, its state does not fit `part`, or a
            parameter is NaN or infinite. If the file is missing, the message lists the existing files.
    """
    put(part, part_at(path, name), only=only, strict=strict)


@torch.inference_mode(False)
def put(part: Any, saved: Checkpoint, *, only: Collection[str] | None = None, strict: bool = True) -> None:
    """Load a state that `part_at` has read into `part`. See `load`."""
    path, state, about = saved
    differ = differences({"config": about.get("config")}, {"config": describe_part(part)["config"]})
    differ = [line for line in differ if not line.startswith("config.seed ")]  # the file has the generator's state
    if strict and only is None and differ:
        raise CheckpointError(
            f"{path}: has another configuration: {'; '.join(differ)}; strict=False loads it nevertheless"
        )
    before, loaded = copy.deepcopy(part.state_dict()), getattr(part, "loaded", None)
    if only is not None:
        chosen = [only] if isinstance(only, str) else only
        state = {**before, **{entry: _entry(state, entry, path) for entry in chosen}}
    try:
        part.load_state_dict(state)
        check_parameters(part, "Load an earlier checkpoint")
    except (ValueError, TypeError, KeyError, RuntimeError, AttributeError, IndexError, NonFiniteError) as error:
        part.load_state_dict(before)  # undo a partial load
        if loaded is not None:
            part.loaded = loaded
        reason = "" if isinstance(error, NonFiniteError) else f"does not fit {type(part).__name__}: "
        raise CheckpointError(f"{path}: {reason}{error}") from error


def part_at(path: str | Path, name: str = "agent") -> Checkpoint:
    """Read the state and the description of a part, from a file of `save` or from a checkpoint of a run."""
    path, state, about = find(path)
    if about.get("kind") != "part":
        builds, parts = about.get("builds"), _entry(about, "parts", path)
        state, about = _entry(_entry(state, "parts", path), name, path), _entry(parts, name, path)
        build = builds.get(name) if isinstance(builds, Mapping) else None
        about = {**about, "build": build, "environment": parts.get("environment")}
    return Checkpoint(path, state, about)


def _entry(mapping: Any, name: str, path: Path) -> Any:
    if not isinstance(mapping, Mapping) or name not in mapping:
        names = ", ".join(mapping) if isinstance(mapping, Mapping) else "none"
        raise CheckpointError(f"{path}: has no {name!r}; it has: {names or 'none'}")
    return mapping[name]
