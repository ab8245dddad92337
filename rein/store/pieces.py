"""One epoch, or one episode, put together from the files in which it lies.

Shapes: T steps of an epoch, N environments, K epochs of a file, E episodes of a file, L transitions of an episode.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from rein.errors import StoreError
from rein.ops.trees import leaves, map_tree
from rein.store.format.tables import Content, Table, read_tree
from rein.types import Episode, Episodes, Trajectory, Tree


def join_fields(parts: Sequence[Any], where: Any) -> Any:
    """Trees of the same kind, one below the other; one alone stays as it is. Raises ValueError where they differ."""
    if len(parts) == 1:
        return parts[0]
    try:
        return map_tree(lambda *arrays: np.concatenate(arrays), *parts)
    except (ValueError, KeyError) as error:
        raise ValueError(f"{where}: fields are not the same in all files; read them epoch by epoch") from error


def read_epoch(contents: Sequence[Content], rows: Sequence[Table], where: Any) -> Trajectory:
    """One epoch, of whose parts `rows` tell, each with the number of its file and its index there."""
    parts = [_read_part(contents[row["file"]], row) for row in rows]
    ended = [part.episodes for part in parts if len(part.episodes.id)] or [parts[0].episodes]
    return parts[0]._replace(
        fields=join_fields([part.fields for part in parts], where),
        next_observation=parts[-1].next_observation,
        episodes=map_tree(lambda *arrays: np.concatenate(arrays), *ended),
    )


def read_episode(contents: Sequence[Content], row: Table, where: Any) -> Episode:
    """The episode that row `row["index"]` of file `row["file"]` tells of. Raises StoreError where rows are missing."""
    first, stop, n = row["first_step"], row["last_step"] + 1, row["environment"]
    fields = join_fields([p for c in contents for p in _read_rows(c, first, stop, n)] or [{}], where)
    there = next((len(leaf) for _, leaf in leaves(fields)), 0)
    if there != row["length"]:
        raise StoreError(f"{where}: of episode {row['id']} there are {there} of {row['length']} transitions")
    file, index = contents[row["file"]].file, row["index"]
    final = file.node("episodes", "final_observation")
    if final is not None:
        final = read_tree(final, lambda stored: file.read(stored, slice(index, index + 1))[0])
    told = {name: row["return" if name == "episode_return" else name] for name in Episode._fields[:-2]}
    return Episode(**told, fields=fields, final_observation=final)


def _read_rows(content: Content, first: int, stop: int, environment: int) -> Iterator[Tree]:
    """What environment `environment` did in the vector steps [first, stop), part for part of the file's epochs."""
    begin_K, length_K = content.epochs["first_step"], content.epochs["length"]
    if environment >= content.num_envs:
        return
    for k in np.flatnonzero((begin_K < stop) & (begin_K + length_K > first)):
        base = content.epochs["first_row"][k] - begin_K[k]
        rows = slice(int(base + max(first, begin_K[k])), int(base + min(stop, begin_K[k] + length_K[k])))
        node = content.file.layout["trajectory"]
        read: Any = read_tree(node, lambda stored, r=rows: content.file.read(stored, r)[:, environment])
        if "valid" in read:
            read = map_tree(lambda array, valid=read["valid"]: array if valid.all() else array[valid], read)
        yield read


def _read_part(content: Content, row: Table) -> Trajectory:
    file, rows = content.file, slice(row["first_row"], row["first_row"] + row["length"])
    ended = np.flatnonzero(content.episodes["epoch"] == row["number"])
    chosen = slice(ended[0], ended[-1] + 1) if len(ended) else slice(0)
    columns = {name: content.episodes[_on_disk(name)][chosen] for name in Episodes._fields[:-1]}
    final, following = file.node("episodes", "final_observation"), file.node("epochs", "next_observation")
    index = slice(row["index"], row["index"] + 1)
    if following is not None:
        following = read_tree(following, lambda stored: file.read(stored, index)[0])
    if final is not None:
        final = read_tree(final, lambda stored: file.read(stored, chosen)) if len(ended) else None
    return Trajectory(
        epoch=int(row["number"]),
        status=str(row["status"]),
        first_step=int(row["first_step"]),
        fields=read_tree(file.layout["trajectory"], lambda stored: file.read(stored, rows)),
        next_observation=following,
        episodes=Episodes(**columns, final_observation=final),
        metrics={name: float(value) for name, value in row["metrics"].items()},
        clocks={name: float(value) for name, value in row["clocks"].items()},
    )


def _on_disk(name: str) -> str:
    return "return" if name == "episode_return" else name
