"""Compose trajectory files: several epochs as one HDF5 file with its layout.

`docs/reference/file_format.md` is the specification.

The rows of all epochs of a file are concatenated, so that each dataset is written once with its final size. Floats are
raw, contiguous and aligned for memory maps. Booleans and integers use gzip, which gains nothing on floats.

Shapes: R rows of all epochs of the file, N environments, E episodes, K epochs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import h5py
import numpy as np

from rein.ops.trees import map_tree
from rein.store.format.layout import CHUNK, MAX_ROWS, describe
from rein.store.format.nexus import (
    Shown,
    add_dataset,
    add_group,
    add_text,
    encode_name,
    interpretation,
    set_attributes,
    write_views,
)
from rein.store.format.sealed import FORMAT, compose
from rein.types import EPISODE_COLUMNS, Trajectory, Tree

_SMALL = 4096  # bytes; for smaller datasets, a chunk index costs more than gzip gains


class Part(NamedTuple):
    """Part of an epoch that is too large for one file; 1 of 1 for a whole epoch."""

    number: int = 1
    total: int = 1


WHOLE = Part()


def compose_trajectories(epochs: Sequence[Trajectory], part: Part = WHOLE, run: str | None = None) -> memoryview:
    """Return the bytes of a file with these epochs, which must have the same `structure`. `run` is `run.json`."""
    layout: list[bytes] = []

    def build(file: h5py.File) -> None:
        _write_trajectories(file, epochs, part, run)
        layout.append(describe(file))

    return compose(build, sum(map(size_of, epochs)), lambda: layout[0])


def _write_trajectories(file: h5py.File, epochs: Sequence[Trajectory], part: Part, run: str | None) -> None:
    set_attributes(file, NX_class="NXroot", creator="rein", rein_format=FORMAT)
    entry = add_group(file, "entry", "NXentry")
    fields = _write_fields(add_group(entry, "trajectory", "NXcollection"), [e.fields for e in epochs if e.fields])
    axes = add_group(entry, "axes", "NXcollection")
    step, env = _write_axes(axes, epochs)
    epoch, metrics = _write_epochs(add_group(entry, "epochs", "NXcollection"), epochs, part)
    last_step, episode_return = _write_episodes(add_group(entry, "episodes", "NXcollection"), epochs)
    if run is not None:
        note = add_group(entry, "run", "NXnote")  # viewers print the JSON
        add_text(note, "type", "application/json")
        add_text(note, "data", run)
    shown = Shown(fields, axes, step, env, last_step, episode_return, epoch, metrics)
    default = write_views(entry, shown, _title(epochs, part))
    if default is not None:
        set_attributes(file, default="entry")
        set_attributes(entry, default=f"views/{default}")


def structure(trajectory: Trajectory) -> tuple[Any, Any, Any]:
    """Return names, dtypes and shapes of fields, next and final observations. None, for a missing one, fits any."""
    episodes = trajectory.episodes
    final = _structure(episodes.final_observation, 1) or ()
    fields = _structure(trajectory.fields, 1) if trajectory.fields else None  # an epoch whose body was skipped
    return fields, _structure(trajectory.next_observation, 0), final if len(episodes.id) else None


def size_of(tree: Any) -> int:
    """Return the bytes of all arrays of a trajectory or a tree."""
    if isinstance(tree, np.ndarray):
        return tree.nbytes
    if isinstance(tree, dict):
        return sum(map(size_of, tree.values()))
    return sum(map(size_of, tree)) if isinstance(tree, tuple) else 0


def rows_of(trajectory: Trajectory) -> int:
    """Return the number of rows of all environments, T * N."""
    return math.prod(_leaf(trajectory.fields).shape[:2]) if trajectory.fields else 0


def split(trajectory: Trajectory, max_bytes: int) -> Iterator[tuple[Part, Trajectory]]:
    """Split an epoch by rows into parts of about `max_bytes`, each with at least one row.

    An episode is listed in the part in which it ends.
    """
    length, size, rows_of_all = _rows(trajectory), size_of(trajectory), rows_of(trajectory)
    rows = max(1, min(length * max_bytes // max(1, size), length * MAX_ROWS // max(1, rows_of_all)))
    starts = range(0, max(1, length), rows)  # an epoch without rows is one part
    home_E = np.clip((trajectory.episodes.last_step - trajectory.first_step) // rows, 0, len(starts) - 1)
    for number, start in enumerate(starts):
        stop, chosen_E = start + rows, home_E == number
        following = trajectory.next_observation
        if stop < length and following is not None:
            following = map_tree(lambda array, row=stop: array[row], trajectory.fields["observation"])
        yield (
            Part(number + 1, len(starts)),
            trajectory._replace(
                first_step=trajectory.first_step + start,
                fields=map_tree(lambda array, a=start, b=stop: array[a:b], trajectory.fields),
                next_observation=following,
                episodes=map_tree(lambda array, e=chosen_E: array[e], trajectory.episodes),
            ),
        )


def _write(group: h5py.Group, name: str, array: np.ndarray) -> h5py.Dataset:
    """Write floats and small arrays raw and contiguous, others in chunks of about 1 MiB with gzip and shuffle."""
    if array.dtype.kind in "fS" or array.nbytes < _SMALL:
        return add_dataset(group, name, array)
    row_bytes = array.nbytes // len(array)
    chunks = (min(len(array), max(1, CHUNK // row_bytes)), *array.shape[1:])
    if row_bytes > CHUNK and array.ndim > 2:
        chunks = (1, max(1, array.shape[1] * CHUNK // row_bytes), *array.shape[2:])
    return add_dataset(group, name, array, chunks=chunks)


def _write_fields(group: h5py.Group, trees: list[Any]) -> dict[str, Any]:
    """Write the fields of all epochs and return the datasets by name."""
    written: dict[str, Any] = {}
    for name in trees[0] if trees else ():
        parts = [tree[name] for tree in trees]
        if isinstance(parts[0], Mapping):
            written[name] = _write_fields(add_group(group, name, "NXcollection"), parts)
            continue
        written[name] = dataset = _write(group, name, np.concatenate(parts))
        attributes: dict[str, Any] = {"dims": ["step", "env", *(f"d{i}" for i in range(dataset.ndim - 2))]}
        if how := interpretation(dataset.shape):
            attributes["interpretation"] = how
            if how == "rgb-image":
                attributes["CLASS"] = "IMAGE"  # for H5Web outside a view
        set_attributes(dataset, **attributes)
    return written


def _write_axes(axes: h5py.Group, epochs: Sequence[Trajectory]) -> tuple[h5py.Dataset, h5py.Dataset]:
    num_envs = next((_leaf(e.fields).shape[1] for e in epochs if e.fields), 0)
    step_R = np.concatenate([e.first_step + np.arange(_rows(e), dtype=np.int64) for e in epochs])
    step, env = _write(axes, "step", step_R), _write(axes, "env", np.arange(num_envs, dtype=np.int64))
    # with different units, viewers stretch a narrow map
    set_attributes(step, units="step", long_name="vector step")
    set_attributes(env, units="index", long_name="environment")
    return step, env


def _write_epochs(
    group: h5py.Group, epochs: Sequence[Trajectory], part: Part
) -> tuple[h5py.Dataset, dict[str, h5py.Dataset]]:
    """Write the table of epochs. Returns the datasets of the epoch numbers and of the metrics by name."""
    length_K = np.array([_rows(epoch) for epoch in epochs], np.int64)
    columns = {
        "number": np.array([epoch.epoch for epoch in epochs], np.int64),
        "first_row": np.cumsum(length_K) - length_K,
        "length": length_K,
        "first_step": np.array([epoch.first_step for epoch in epochs], np.int64),
        "status": np.array([epoch.status.encode() for epoch in epochs]),
        "part": np.full(len(epochs), part.number, np.int64),
        "parts": np.full(len(epochs), part.total, np.int64),
    }
    written = {name: _write(group, name, column) for name, column in columns.items()}
    set_attributes(written["number"], long_name="epoch")
    metrics, _ = (
        _write_numbers(add_group(group, name, "NXcollection"), [getattr(epoch, name) for epoch in epochs])
        for name in ("metrics", "clocks")
    )
    following = [epoch.next_observation for epoch in epochs]
    stored = next((tree for tree in following if tree is not None), None)
    blank = map_tree(lambda array: np.full_like(array, np.nan if array.dtype.kind == "f" else 0), stored)
    _write_trees(group, "next_observation", [blank if tree is None else tree for tree in following], np.stack)
    return written["number"], metrics


def _write_numbers(group: h5py.Group, rows: list[Mapping[str, float]]) -> dict[str, h5py.Dataset]:
    """Write one column per name, with NaN for epochs without it. Returns the datasets by name."""
    written: dict[str, h5py.Dataset] = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        column = np.array([row.get(name, np.nan) for row in rows], np.float64)
        written[name] = _write(group, encode_name(name), column)
        set_attributes(written[name], long_name=name)
    return written


def _write_episodes(group: h5py.Group, epochs: Sequence[Trajectory]) -> tuple[h5py.Dataset, h5py.Dataset]:
    """Write the table of episodes. Returns the datasets of their last steps and returns."""
    episodes = [epoch.episodes for epoch in epochs]
    numbers = np.array([epoch.epoch for epoch in epochs], np.int64)
    _write(group, "epoch", np.repeat(numbers, [len(e.id) for e in episodes]))
    written: dict[str, h5py.Dataset] = {}
    for name in EPISODE_COLUMNS:
        column = np.concatenate([getattr(e, name) for e in episodes])
        written[name] = _write(group, "return" if name == "episode_return" else name, column)
    if any(e.options is not None for e in episodes):
        texts = [np.zeros(len(e.id), "S1") if e.options is None else e.options for e in episodes]
        _write(group, "options", np.concatenate(texts))
    last_step, returns = written["last_step"], written["episode_return"]
    set_attributes(last_step, units="step", long_name="vector step in which the episode ended")
    set_attributes(returns, long_name="episode return")
    _write_trees(group, "final_observation", [e.final_observation for e in episodes if len(e.id)], np.concatenate)
    return last_step, returns


def _write_trees(group: h5py.Group, name: str, trees: list[Any], join: Callable[[list[Any]], np.ndarray]) -> None:
    if not trees or trees[0] is None:
        return
    if not isinstance(trees[0], Mapping):
        _write(group, name, join(trees))
        return
    child = add_group(group, name, "NXcollection")
    for key in trees[0]:
        _write_trees(child, key, [tree[key] for tree in trees], join)


def _title(epochs: Sequence[Trajectory], part: Part) -> str:
    first, last = epochs[0].epoch, epochs[-1].epoch
    which = f"epoch {first}" if first == last else f"epochs {first} to {last}"
    return which if part.total == 1 else f"{which}, part {part.number} of {part.total}"


def _structure(tree: Tree, skip: int) -> Any:
    if isinstance(tree, dict):
        return tuple((name, _structure(value, skip)) for name, value in tree.items())
    return None if tree is None else (tree.dtype, tree.shape[skip:])


def _rows(epoch: Trajectory) -> int:
    return len(_leaf(epoch.fields)) if epoch.fields else 0


def _leaf(tree: Tree) -> np.ndarray:
    while isinstance(tree, dict):
        tree = next(iter(tree.values()))
    return tree
