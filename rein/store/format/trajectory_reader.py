"""Read one trajectory file: hash, layout, and the tables of epochs and episodes, checked against the rows.

Also joins tables of many files. Shapes: R rows of the file, K epochs, E episodes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rein.errors import StoreError
from rein.ops.trees import leaves, map_tree
from rein.store.format import sealed
from rein.store.format.layout import Stored, read_layout
from rein.store.format.mapping import MappedFile, Stamp, stamp_of
from rein.store.format.nexus import decode_name

Table = dict[str, Any]  # name -> column, all of the same length; `metrics` and `clocks` are nested tables

EPOCHS = ("number", "first_row", "length", "first_step", "part", "parts")
EPISODES = {name: "i" for name in ("id", "environment", "first_step", "last_step", "seed", "length", "epoch")}
EPISODES |= {"return": "f", "terminated": "b", "truncated": "b"}

MISREAD = (KeyError, ValueError, TypeError, AttributeError, IndexError)  # raised for files of unexpected content

_FLAGS = {"valid", "terminated", "truncated"}
_STATUS = 64  # bytes
_STEPS = 2**60  # sums of smaller steps do not overflow


class Content(NamedTuple):
    """File with its tables, and its fields by path; each (R, N, ...)."""

    file: MappedFile
    epochs: Table
    episodes: Table
    fields: dict[str, Stored]

    @property
    def num_envs(self) -> int:
        """N, or 0 without fields."""
        return next((stored.shape[1] for stored in self.fields.values()), 0)

    @property
    def rows(self) -> int:
        """R."""
        return int(self.epochs["length"].sum())


def read_content(file: MappedFile) -> Content:
    """Return the tables of a file. Raises ValueError, KeyError, ... if the datasets are not those of rein."""
    table = file.layout["epochs"]
    epochs: Table = {name: _column(file, table, name, "i") for name in EPOCHS}
    if isinstance(status := table["status"], Stored) and status.dtype.itemsize > _STATUS:
        raise ValueError("the column 'status' is invalid")  # as a string it would take four times its bytes
    epochs["status"] = _column(file, table, "status", "S").astype(str)
    for kind in ("metrics", "clocks"):
        epochs[kind] = {decode_name(name): _column(file, table[kind], name, "f") for name in table[kind]}
    table = file.layout["episodes"]
    episodes = {name: _column(file, table, name, kind) for name, kind in EPISODES.items()}
    empty = np.zeros(len(episodes["id"]), "S1")
    episodes["options"] = _column(file, table, "options", "S") if "options" in table else empty
    content = Content(file, epochs, episodes, dict(_fields(file.layout["trajectory"])))
    _check(content)
    return content


def _column(file: MappedFile, table: Any, name: str, kind: str) -> np.ndarray:
    stored = table[name]
    if not isinstance(stored, Stored) or len(stored.shape) != 1 or stored.dtype.kind != kind:
        raise ValueError(f"the column {name!r} is invalid")
    return np.array(file.read(stored))  # a copy, so that the file need not stay mapped


def _fields(node: Any, path: str = "") -> Iterator[tuple[str, Stored]]:
    for name, child in node.items():
        where = f"{path}/{name}" if path else name
        yield from [(where, child)] if isinstance(child, Stored) else _fields(child, where)


def _check(content: Content) -> None:
    epochs, episodes = content.epochs, content.episodes
    number, length, part, parts = (epochs[name] for name in ("number", "length", "part", "parts"))
    if not len(number) or len({len(column) for _, column in leaves(epochs)}) != 1:
        raise ValueError("its table of epochs is empty or has columns of different lengths")
    cut = parts[0] != 1
    if number[0] < 1 or (np.diff(number) <= 0).any() or (cut and len(number) > 1):
        raise ValueError("its epochs are out of order")
    if not ((part >= 1) & (part <= parts) & (parts == parts[0])).all():
        raise ValueError("its part numbers are invalid")
    if (length < 0).any() or (length > 2**40).any() or (epochs["first_row"] != np.cumsum(length) - length).any():
        raise ValueError("its epochs are not contiguous")
    for path, stored in content.fields.items():
        if len(stored.shape) < 2 or stored.shape[:2] != (content.rows, content.num_envs) or stored.dtype.kind == "S":
            raise ValueError(f"the field {path} does not fit the table of epochs")
    if (abs(epochs["first_step"].astype(np.float64)) > _STEPS).any():
        raise ValueError("its epochs begin at invalid steps")
    for name in _FLAGS & content.file.layout["trajectory"].keys():
        stored = content.fields.get(name)
        if stored is None or len(stored.shape) != 2 or (name == "valid" and stored.dtype.kind != "b"):
            raise ValueError(f"the field {name} is not a flag of every row")
    if content.rows and not content.num_envs:
        raise ValueError("it has rows but no fields or no environments")
    if len({len(column) for column in episodes.values()}) != 1:
        raise ValueError("its table of episodes has columns of different lengths")
    if (episodes["environment"] < 0).any():  # NumPy would count from the end
        raise ValueError("an episode has a negative environment")
    _check_observations(content, content.file.node("episodes", "final_observation"), (len(episodes["id"]),))
    _check_observations(content, content.file.node("epochs", "next_observation"), (len(number), content.num_envs))


def _check_observations(content: Content, node: Any, lead: tuple[int, ...]) -> None:
    """Check that final or next observations have the leading shape `lead`, and dtype and shape of the rows'."""
    observed = content.file.node("trajectory", "observation")
    others, rows = ({p: s for p, s in _fields({} if n is None else {"": n})} for n in (node, observed))
    if any(stored.shape[:1] != lead[:1] for stored in others.values()):
        raise ValueError("its final or next observations do not fit its tables")
    if node is None or observed is None:
        return
    if others.keys() != rows.keys() or any(
        s.shape != (*lead, *rows[p].shape[2:]) or s.dtype != rows[p].dtype for p, s in others.items()
    ):
        raise ValueError("its final or next observations do not fit its observations")


def read_options(text: bytes) -> dict[str, Any] | None:
    """Return the reset options of an episode, or None. Raises ValueError if they are not a JSON dictionary."""
    try:
        options = json.loads(text) if text else None
    except (ValueError, RecursionError):
        options = text
    if options is not None and not isinstance(options, dict):
        raise ValueError(f"its reset options are not a JSON dictionary: {options!r:.80}")
    return options


def read_tree(node: Any, read: Callable[[Stored], np.ndarray]) -> Any:
    """Apply `read` to a dataset, or to all datasets of a group, which gives a dictionary."""
    return {name: read_tree(child, read) for name, child in node.items()} if isinstance(node, dict) else read(node)


def join(tables: Sequence[Table], sizes: Sequence[int] | None = None) -> Table:
    """Concatenate tables. Missing columns are filled with NaN."""
    sizes = sizes or [len(next(iter(table.values()))) for table in tables]
    joined: Table = {}
    for name in dict.fromkeys(name for table in tables for name in table):
        columns = [table.get(name) for table in tables]
        if any(isinstance(column, dict) for column in columns):
            joined[name] = join([column or {} for column in columns], sizes)
        else:
            filled = [np.full(n, np.nan) if c is None else c for c, n in zip(columns, sizes, strict=True)]
            joined[name] = np.concatenate(filled)
    return joined


def take_rows(table: Table, rows: Any) -> Table:
    """Return these rows of a table."""
    return map_tree(lambda column: column[rows], table)


def open_content(path: Path) -> Content:
    """Check the hash, the layout and the tables of a file, and return the tables. Raises StoreError."""
    stamp = stamp_of(path)
    sealed.verify(path)
    return content_of(path, stamp)


def content_of(path: Path, stamp: Stamp) -> Content:
    """Return the tables of a file whose hash was correct when its `stamp` was taken. Raises StoreError."""
    file = MappedFile(path, stamp, read_layout(path))
    try:
        return read_content(file)
    except MISREAD as error:
        raise StoreError(f"{path}: is not a valid trajectory file: {error}") from error
    finally:
        file.unmap()  # the tables are copies, and often nothing else of a file is read
