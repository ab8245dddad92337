"""Going on with a run from what its folder holds."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch

from rein.errors import CheckpointError
from rein.loop import Loop
from rein.store.checkpoint import Checkpoint, describe_parts, differences, versions
from rein.store.columns import evaluations_of, newer_rows
from rein.store.finding import find
from rein.store.folder import move_aside, newer_files
from rein.store.hdf5 import HDF5Store
from rein.store.retention import order

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
