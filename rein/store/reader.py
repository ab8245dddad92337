"""Read the trajectories of a run as NumPy arrays or torch tensors.

The hash of a file is checked before the file is read, and files are read when their data is first used. All files of a
run appear as one: tables and fields are joined, and the parts of a split epoch are merged.

Shapes: R rows of all epochs, T steps of an epoch, N environments, K epochs, E episodes, L transitions of an episode.
"""

from __future__ import annotations

import collections
import functools
import itertools
import logging
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rein.errors import StoreError
from rein.files import absolute, followed, inside, read_json, short
from rein.ops.trees import leaves, map_tree
from rein.store.folder import TRAJECTORIES, list_files
from rein.store.format import sealed
from rein.store.format.trajectory_reader import (
    EPISODES,
    EPOCHS,
    Content,
    Table,
    join,
    open_content,
    read_options,
    read_tree,
    stamp_of,
    take_rows,
)
from rein.store.row_index import whole_episodes
from rein.types import EPISODE_COLUMNS, Episode, Episodes, Trajectory, Tree

if TYPE_CHECKING:
    from rein.store.datasets import Sequences, Transitions

logger = logging.getLogger("rein")


class Columns(dict[str, Any]):
    """Table or fields by name. An error for an unknown name lists the names."""

    def __missing__(self, name: object) -> Any:
        raise KeyError(f"there is no {name!r}; the names are {', '.join(self)}")


def open_run(path: str | Path, *, follow: bool = False) -> Run:
    """Open the trajectories of a run folder, or one trajectory file.

    With `follow`, the run may still be writing, even its first file. Iteration then continues with files that are
    finished meanwhile, as with `refresh`. Raises StoreError if no file exists or a header is invalid.
    """
    return Run(absolute(path), follow=follow)


def _no_files_message(path: Path) -> str:
    if (path / "run.json").exists() or (path / TRAJECTORIES).is_dir():
        return (
            f"{path}: no trajectories yet: no file is finished; open the run after the first epochs, or use "
            "open_run(path, follow=True)"
        )
    reason = "" if path.exists() else ", because the path does not exist"
    return f"{path}: no trajectories{reason}; give the folder of a run or a file of its folder trajectories/"


class Run:
    """Finished trajectory files of a run. `path` is the folder of the run, or one file.

    The files are those that were finished when the run was opened or last refreshed.
    """

    def __init__(self, path: Path, *, follow: bool = False) -> None:
        self.path = path
        self._follow = follow
        self._checked: dict[Path, Content] = {}
        self._paths = self._find()
        if not self._paths and not follow:
            raise StoreError(_no_files_message(path))
        for file in [] if follow else self._paths:  # a followed run may remove a file at any time
            sealed.promised_hash(file)

    def __repr__(self) -> str:
        epochs, episodes = len(self.epochs["number"]), len(self.episodes["id"])
        return f"Run({str(short(self.path))!r}: {len(self.files)} files, {epochs} epochs, {episodes} episodes)"

    def __iter__(self) -> Iterator[Trajectory]:
        """Yield every epoch in order. With `follow`, epochs that are finished during the iteration are included."""
        last = 0
        while True:
            if self._follow:
                self.refresh()
            numbers = self.epochs["number"]
            numbers = numbers[numbers > last].tolist()
            if not numbers:
                return
            for number in numbers:
                try:
                    trajectory = self.trajectory(number)
                except StoreError:
                    if not self._follow or not self.refresh():
                        raise
                    break  # the store has removed the file, as with `keep_best`: continue with the remaining files
                yield trajectory
                last = number

    def refresh(self) -> bool:
        """Look for files that were finished or removed since the last call. Returns True if there are any.

        Existing datasets are not changed.
        """
        before, self._paths = self._paths, self._find()
        changed = self._paths != before
        for name in ("epochs", "episodes", "fields", "_contents", "_rows") if changed else ():
            self.__dict__.pop(name, None)
        return changed

    @property
    def info(self) -> dict[str, Any]:
        """Content of `run.json`, or an empty dictionary if the file is missing."""
        file = self.path / "run.json"
        try:
            return read_json(file)
        except (FileNotFoundError, NotADirectoryError):  # missing, or the run is a single file
            return {}
        except (OSError, ValueError) as error:
            raise StoreError(f"{file}: cannot be read as JSON: {getattr(error, 'strerror', None) or error}") from error

    @property
    def files(self) -> list[Path]:
        """Files in order, without those of an epoch with a missing part. A single part can be opened alone."""
        return [content.file.path for content in self._contents]

    @functools.cached_property
    def epochs(self) -> Table:
        """Table with one row per epoch: number, first_row, length, first_step, status, metrics, clocks; each (K,)."""
        rows = self._rows
        first = np.flatnonzero(np.diff(rows["number"], prepend=0))  # of the parts of an epoch
        table = take_rows(rows, first)
        if len(first):
            table["length"] = np.add.reduceat(rows["length"], first)
        table["first_row"] = np.cumsum(table["length"]) - table["length"]
        table |= {kind: Columns(table[kind]) for kind in ("metrics", "clocks")}
        return Columns({name: table[name] for name in table if name not in ("part", "parts", "file", "index")})

    @functools.cached_property
    def episodes(self) -> Table:
        """Table with one row per episode, sorted by end: the columns of the files and `whole`; each (E,).

        `whole` is True if every transition of the episode is stored, so that `episode(id)` can read it. It is False
        for episodes that began in an epoch that the store did not keep.
        """
        empty = {name: np.zeros(0, f"{kind}8" if kind != "b" else bool) for name, kind in EPISODES.items()}
        empty["options"] = np.zeros(0, "S1")
        table = join([content.episodes for content in self._contents] or [empty])
        return Columns(table | {"whole": whole_episodes(self._contents, table)})

    @functools.cached_property
    def fields(self) -> dict[str, tuple[np.dtype, tuple[int, ...]]]:
        """Dtype and shape (R, N, ...) of every field in the first file, by path such as `observation/camera`."""
        rows = int(self.epochs["length"].sum())
        first = self._filled[0].fields if self._filled else {}
        return Columns({path: (stored.dtype, (rows, *stored.shape[1:])) for path, stored in first.items()})

    def field(self, name: str, rows: slice = slice(None)) -> Tree:
        """Return a field of all epochs, (R, N, ...), or of some rows. A nested field is a dictionary of arrays.

        Floats from a single file are a read-only memory map, which takes no memory, or a read-only copy if they are
        smaller than 4 KiB. Other arrays are copies. Raises ValueError if the field does not exist, or if the files
        differ in its dtype or shape.
        """
        if not any(path == name or path.startswith(f"{name}/") for path in self.fields):
            raise ValueError(f"{self.path}: no field {name!r}; the fields are {', '.join(self.fields)}")
        total = int(self.epochs["length"].sum())
        first, stop, step = rows.indices(total)
        if step != 1:
            raise ValueError(f"field({name!r}, {rows}): the step must be 1; read all rows and slice the array")
        parts, begin = [], 0
        for content in self._filled:
            part = slice(max(0, first - begin), max(0, min(stop - begin, content.rows)))
            if part.start < part.stop or (first >= stop and not parts):  # an empty selection has the type of the field
                node = content.file.node("trajectory", *name.split("/"))
                if node is None:
                    raise ValueError(f"{content.file.path}: has no field {name!r}; read its epochs one by one")
                parts.append(read_tree(node, lambda stored, f=content.file, rows=part: f.read(stored, rows)))
            begin += content.rows
        return join_fields(parts, self.path)

    def tensor(self, name: str, rows: slice = slice(None)) -> Tree:
        """Return a field as torch tensors that share no memory with the file. See `field`."""
        from rein.store.datasets import to_torch

        return to_torch(self.field(name, rows))

    def trajectory(self, epoch: int) -> Trajectory:
        """Return one epoch as it was appended to the store, as NumPy arrays. Raises ValueError if it is not stored."""
        rows = np.flatnonzero(self._rows["number"] == epoch)
        if not len(rows):
            numbers = self.epochs["number"]
            stored = f"{len(numbers)} are stored, {numbers[0]} to {numbers[-1]}" if len(numbers) else "none is stored"
            raise ValueError(f"{self.path}: no epoch {epoch}; {stored}")
        return read_epoch(self._contents, [take_rows(self._rows, row) for row in rows], self.path)

    def episode(self, id: int) -> Episode:
        """Return one whole episode, which may span epochs and files.

        Raises ValueError for an unknown id, and StoreError if some transitions are not stored: see the column `whole`
        of `episodes`.
        """
        index = np.flatnonzero(self.episodes["id"] == id)
        if not len(index):
            raise ValueError(self._no_episode(id))
        row = {name: column[index[0]].item() for name, column in self.episodes.items()}
        for file, content in enumerate(self._contents):
            if len(place := np.flatnonzero(content.episodes["id"] == id)):
                return read_episode(self._contents, row | {"file": file, "index": int(place[0])}, self.path)
        raise AssertionError("unreachable: the table has the episode")

    def transitions(
        self, fields: Collection[str] | None = None, episodes: Collection[int] | np.ndarray | None = None
    ) -> Transitions:
        """Return all transitions as a `torch.utils.data.Dataset`. See `rein.store.datasets.Transitions`.

        `fields` are the names of the fields, by default all. `episodes` are the ids of the episodes, by default all,
        such as `run.episodes["id"][run.episodes["return"] > 100]`.
        """
        from rein.store.datasets import Transitions

        return Transitions(self._filled, fields, self._chosen(episodes))

    def sequences(
        self,
        length: int,
        stride: int = 1,
        fields: Collection[str] | None = None,
        episodes: Collection[int] | np.ndarray | None = None,
        *,
        pad: bool = False,
        min_length: int | None = None,
    ) -> Sequences:
        """Return windows of `length` consecutive transitions as a dataset. See `rein.store.datasets.Sequences`.

        With `pad`, shorter windows at the ends of episodes are padded with zeros, and `valid` is False there.
        `min_length` selects the finished episodes with at least this many transitions. Without both, a warning states
        how many of the episodes are shorter than `length` and therefore in no window.
        """
        from rein.store.datasets import Sequences

        chosen = self._chosen(episodes)
        table = self.episodes if chosen is None else chosen
        short_E = table["length"] < (length if min_length is None else min_length)
        if min_length is not None:
            chosen = take_rows(table, ~short_E)
        elif not pad and short_E.any():
            logger.warning(
                f"sequences({length=}): {short_E.sum()} of {len(short_E)} episodes are shorter and are left out; "
                f"pad=True keeps them, and min_length={length} selects the others"
            )
        return Sequences(self._filled, length, stride, fields, chosen, pad)

    def _chosen(self, episodes: Collection[int] | np.ndarray | None) -> Table | None:
        """Return the table of the episodes with these ids. Raises TypeError or ValueError for bad ids."""
        if episodes is None:
            return None
        table, wanted = self.episodes, np.asarray(list(episodes))
        if wanted.size and wanted.dtype.kind not in "iu":
            raise TypeError(f'episodes must be ids, got {wanted.dtype}; for a mask use run.episodes["id"][mask]')
        if missing := np.setdiff1d(wanted, table["id"]).tolist():
            raise ValueError(self._no_episode(missing[0]))
        return take_rows(table, np.isin(table["id"], wanted))

    def _no_episode(self, id: int) -> str:
        ids = self.episodes["id"]
        stored = f"{len(ids)} are stored, {ids.min()} to {ids.max()}" if len(ids) else "none is stored"
        return f"{self.path}: no episode {id}; {stored}"

    def _find(self) -> list[Path]:
        path = self.path
        if path.is_file():
            return [followed(path)]
        return list_files(inside(path, TRAJECTORIES)) or list_files(path)

    @functools.cached_property
    def _contents(self) -> list[Content]:
        contents = self._read_contents()
        parts = collections.Counter(content.epochs["number"][0] for content in contents)
        whole = [c for c in contents if c.epochs["parts"][0] in (1, parts[c.epochs["number"][0]])]
        if not whole and len(contents) != 1 and not self._follow:
            raise StoreError(f"{self.path}: a part of its only epoch is missing; open the files of the parts instead")
        chosen = whole or ([] if self._follow else contents)
        for before, after in itertools.pairwise(chosen):
            last, first = (before.epochs["number"][-1], before.epochs["part"][-1]), after.epochs
            if not (first["number"][0] > last[0] or (first["number"][0], first["part"][0]) == (last[0], last[1] + 1)):
                raise StoreError(
                    f"{after.file.path}: begins with epoch {first['number'][0]}, "
                    f"but the file before it ends with epoch {last[0]}"
                )
        return chosen

    def _read_contents(self) -> list[Content]:
        """Return every file. Each is checked when it is first read, and again after it has changed."""
        for path in self._paths:
            if path not in self._checked or self._checked[path].file.stamp != stamp_of(path):
                self._checked[path] = open_content(path)
        return [self._checked[path] for path in self._paths]

    @property
    def _filled(self) -> list[Content]:
        """Files that have rows. A file that holds only skipped epochs has no fields."""
        return [content for content in self._contents if content.rows]

    @functools.cached_property
    def _rows(self) -> Table:
        """Joined epoch tables of all files: one row per part, with the columns `file` and `index` of its position."""
        tables = []
        for number, content in enumerate(self._contents):
            index = np.arange(len(content.epochs["number"]))
            tables.append(content.epochs | {"file": np.full_like(index, number), "index": index})
        empty: Table = {name: np.zeros(0, np.int64) for name in (*EPOCHS, "file", "index")}
        return join(tables or [empty | {"status": np.zeros(0, "U9"), "metrics": {}, "clocks": {}}])


def join_fields(parts: Sequence[Any], where: Any) -> Any:
    """Concatenate trees of arrays along the first dimension. Raises ValueError if they differ."""
    if len(parts) == 1:
        return parts[0]
    try:
        return map_tree(lambda *arrays: np.concatenate(arrays), *parts)
    except (ValueError, KeyError) as error:
        raise ValueError(f"{where}: the files differ in their fields; read them epoch by epoch") from error


def read_epoch(contents: Sequence[Content], rows: Sequence[Table], where: Any) -> Trajectory:
    """Read one epoch. `rows` are the rows of its parts, each with its file number and its index in that file."""
    parts = [_read_part(contents[row["file"]], row) for row in rows]
    ended = [part.episodes for part in parts if len(part.episodes.id)] or [parts[0].episodes]
    episodes: Episodes = map_tree(lambda *arrays: np.concatenate(arrays), *ended)
    if not (episodes.options != b"").any():
        episodes = episodes._replace(options=None)
    return parts[0]._replace(
        fields=join_fields([part.fields for part in parts], where),
        next_observation=parts[-1].next_observation,
        episodes=episodes,
    )


def read_episode(contents: Sequence[Content], row: Table, where: Any) -> Episode:
    """Read the episode in row `row["index"]` of file `row["file"]`. Raises StoreError if transitions are missing."""
    first, stop, n = row["first_step"], row["last_step"] + 1, row["environment"]
    fields = join_fields([p for c in contents for p in _read_rows(c, first, stop, n)] or [{}], where)
    stored = next((len(leaf) for _, leaf in leaves(fields)), 0)
    if stored != row["length"]:
        raise StoreError(f"{where}: episode {row['id']} has only {stored} of its {row['length']} transitions stored")
    file, index = contents[row["file"]].file, row["index"]
    final = file.node("episodes", "final_observation")
    if final is not None:
        final = read_tree(final, lambda stored: file.read(stored, slice(index, index + 1))[0])
    columns = {name: row[_on_disk(name)] for name in EPISODE_COLUMNS}
    try:
        options = read_options(row["options"])
    except ValueError as error:
        raise StoreError(f"{where}: episode {row['id']}: {error}") from error
    return Episode(**columns, fields=fields, final_observation=final, options=options)


def _read_rows(content: Content, first: int, stop: int, environment: int) -> Iterator[Tree]:
    """Yield the rows of one environment in the vector steps [first, stop), epoch by epoch."""
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
    columns = {name: content.episodes[_on_disk(name)][chosen] for name in EPISODE_COLUMNS}
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
        episodes=Episodes(**columns, final_observation=final, options=content.episodes["options"][chosen]),
        metrics={name: float(value) for name, value in row["metrics"].items()},
        clocks={name: float(value) for name, value in row["clocks"].items()},
    )


def _on_disk(name: str) -> str:
    return "return" if name == "episode_return" else name
