"""One part of a run, an agent say: in a file of its own, and back from there or from a checkpoint of the run."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from rein.errors import CheckpointError
from rein.files import absolute
from rein.store.checkpoint import Checkpoint, describe_part, differences, versions, write_checkpoint
from rein.store.finding import find
from rein.store.spaces import describe_build


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
