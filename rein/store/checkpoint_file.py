"""Read and write checkpoint files. A file holds the state of a run or of one part, and a description of it.

The state is the `state_dict` of the loop or of the part. `describe` and `describe_part` define the description. A
file is written atomically, and reading it never executes code.

Large blocks of replay buffers are in row files, which several checkpoints share::

    checkpoints/rows/<sha256>.h5    a block of rows, named by the hash in its user block

A block that does not change between two checkpoints is copied and written once, and both checkpoints list it. Each row
file holds the state `{"rows": tensor}`, so any viewer opens it.
"""

from __future__ import annotations

import functools
import os
import platform
import re
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rein.errors import CheckpointError, StoreError
from rein.files import inside, open_file
from rein.loop import Loop
from rein.loop.info import version_of
from rein.ops.trees import leaves
from rein.protocols import Store, missing_names
from rein.replay.storage import Mark, mark_of
from rein.spaces.space_json import describe_build
from rein.store.format.sealed import (
    USER_BLOCK,
    parse_user_block,
    read_sealed,
    sync_folder,
    write_whole,
)
from rein.store.format.state_codec import (
    TRAILER_LENGTH,
    Shard,
    decode_state,
    encode_state,
    find_texts,
    hold,
    parse_json,
)

FORMAT = 2  # incremented when an older rein could not load the state

ROWS = "rows"
BEST = "best"
LEAST = 1 << 20  # bytes; a smaller block is stored in the checkpoint itself

_NAME = re.compile(r"[0-9a-f]{64}")
_PACKAGES = ("rein", "torch", "numpy", "gymnasium")


class Checkpoint(NamedTuple):
    """Content of a checkpoint file: the state and its description."""

    path: Path
    state: dict[str, Any]
    about: dict[str, Any]

    def __repr__(self) -> str:
        """Return the path, and below it progress and parts of the run, or the type of the part."""
        shown = {name: self.about[name] for name in ("type", "epoch", "iteration", "clocks") if name in self.about}
        if isinstance(parts := self.about.get("parts"), Mapping):
            shown["parts"] = [*parts]
        return "\n  ".join([f"Checkpoint {self.path}", *(f"{name}: {value!r:.200}" for name, value in shown.items())])


def write_checkpoint(path: Path, state: Any, about: Mapping[str, Any]) -> None:
    """Write a state atomically. The file is safe on the disk when this function returns.

    Raises CheckpointError with the path and the reason.
    """
    try:
        content = encode_state(state, {"format": FORMAT, **about})
        write_whole(path, content)
    except StoreError as error:
        raise CheckpointError(str(error)) from error
    except (TypeError, ValueError, RuntimeError, MemoryError) as error:
        raise CheckpointError(f"{path}: the state cannot be stored: {error}") from error


def read_checkpoint(path: str | Path) -> Checkpoint:
    """Check the hashes of a checkpoint and of the row files that it lists, and read them.

    Raises CheckpointError with the path and the reason.
    """
    path = Path(path).expanduser()
    try:
        state, about = decode_state(read_sealed(path), rows_of(path))
        if about.get("format") != FORMAT:
            raise ValueError(f"it has format version {about.get('format')!r}; this rein reads version {FORMAT}")
        if not isinstance(state, dict):
            raise ValueError("its state is not a dictionary")
    except StoreError as error:
        raise CheckpointError(str(error)) from error
    except (ValueError, MemoryError) as error:
        raise CheckpointError(f"{path}: cannot be loaded: {error}") from error
    return Checkpoint(path, state, about)


def look(path: Path) -> dict[str, Any] | None:
    """Return the description in a checkpoint file, or None if the file is damaged.

    This function is fast because it does not check the hash. It is used to sort files.
    """
    try:
        with open_file(path) as file:
            start = max(0, os.fstat(file.fileno()).st_size - TRAILER_LENGTH)
            file.seek(start)
            (offset, length), _ = find_texts(file.read())
            file.seek(offset)
            about = parse_json(file.read(min(length, start)), (offset, length), first=offset)
        return about if isinstance(about, dict) else None
    except (OSError, ValueError, MemoryError, OverflowError):
        return None


_SPEED_OPTIONS = ("threads", "workers", "micro_batch", "compile", "device", "guard")


def describe(loop: Loop) -> dict[str, Any]:
    """Return the description that is stored with the state of a run: progress, parts, builds and versions."""
    state = loop.state
    return {
        "kind": "run",
        "total_iterations": state.total_iterations,
        "epochs_ended": state.clocks.epochs,
        "epoch": state.epoch,
        "iteration": state.iteration,
        "epoch_open": state.epoch_open,
        "clocks": state.clocks.as_dict(),
        "metrics": dict(state.metrics),
        "parts": describe_parts(loop.parts),
        "builds": {name: build for name, part in loop.parts.items() if (build := describe_build(part))},
        "versions": versions(),
        "threads": torch.get_num_threads(),
    }


def describe_part(part: Any) -> dict[str, Any]:
    """Return the type and the configuration of a part."""
    return {"type": type(part).__qualname__, "config": getattr(part, "config", {})}


def describe_parts(parts: Mapping[str, Any]) -> dict[str, Any]:
    """Describe the parts whose configuration affects the results: all parts with a state, except stores."""
    stateful = {name: part for name, part in parts.items() if hasattr(part, "state_dict")}
    return {name: describe_part(part) for name, part in stateful.items() if missing_names(part, Store)}


def differences(
    theirs: Any, ours: Any, path: tuple[str, ...] = (), by_chance: Collection[tuple[str, str]] = ()
) -> list[str]:
    """Return the differences of two configurations, such as `agent.config.gamma was 0.99 and is 0.9`.

    Options that affect only the speed are ignored, and so is a saved seed if `ours` has none. `by_chance` holds the
    first and the last name of paths with random values, which are also ignored.
    """
    name = path[-1] if path else ""
    if name in _SPEED_OPTIONS or (name == "seed" and ours is None) or (path and (path[0], name) in by_chance):
        return []
    pairs: Iterable[tuple[str, Any, Any]] | None = None
    if isinstance(theirs, Mapping) and isinstance(ours, Mapping):
        pairs = ((name, theirs.get(name), ours.get(name)) for name in dict.fromkeys((*theirs, *ours)))
    elif isinstance(theirs, list | tuple) and isinstance(ours, list | tuple) and len(theirs) == len(ours):
        pairs = ((str(place), a, b) for place, (a, b) in enumerate(zip(theirs, ours, strict=True)))
    if pairs is not None:
        return [line for name, a, b in pairs for line in differences(a, b, (*path, name), by_chance)]
    same = theirs == ours or (theirs != theirs and ours != ours)
    return [] if same else [f"{'.'.join(path)} was {_short(theirs)} and is {_short(ours)}"]


def is_finite(state: Any) -> bool:
    """Return whether all floating-point tensors of a tree are finite. The tensors must be on the host."""
    tensors = [leaf for _, leaf in leaves(state) if isinstance(leaf, torch.Tensor)]
    return all(bool(torch.isfinite(x).all()) for x in tensors if x.is_floating_point() and x.element_size() > 1)


@functools.cache
def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that can change results in the last bits."""
    return {"python": platform.python_version()} | {name: version_of(name) for name in _PACKAGES}


def _short(value: Any) -> str:
    return "absent" if value is None else f"{value!r:.80}"


class Shards:
    """Row files of a folder of checkpoints. The training thread calls `hold`, the writer's thread everything else."""

    def __init__(self, folder: Path) -> None:
        """`folder` is the folder of the checkpoints."""
        self._checkpoints = folder
        self._written: weakref.WeakSet[Shard] = weakref.WeakSet()  # written shards that are still referenced
        self.forget()

    @property
    def folder(self) -> Path:
        """Folder of the row files. Raises StoreError if it is a symbolic link."""
        return inside(self._checkpoints, ROWS)

    def forget(self) -> None:
        """Forget all blocks. The next checkpoint copies and writes all of them."""
        self._shards_by_mark: weakref.WeakKeyDictionary[Mark, Shard] = weakref.WeakKeyDictionary()

    def hold(self, leaf: Any) -> Any:
        """Copy a leaf to the host. A large block of a replay buffer becomes a shard, which is copied if it is new."""
        mark = mark_of(leaf) if isinstance(leaf, Tensor) else None
        if mark is None or leaf.nbytes < LEAST:
            return hold(leaf)
        shard = self._shards_by_mark.get(mark)
        if shard is None:
            shard = self._shards_by_mark[mark] = Shard(hold(leaf))
        return shard

    def write(self, state: Any) -> list[str]:
        """Write every shard in a tree that has no file yet. Returns the names of all shards in the tree.

        Raises StoreError if a file cannot be written or was removed.
        """
        names: dict[str, None] = {}
        for shard in (leaf for _, leaf in leaves(state) if isinstance(leaf, Shard)):
            if shard.held is not None:
                self._write(shard)
            elif not self._path(shard.name).exists():
                raise StoreError(f"{self._path(shard.name)}: was removed, but a checkpoint needs it")
            names[shard.name] = None
        return list(names)

    def _write(self, shard: Shard) -> None:
        content = encode_state({"rows": shard.held}, {"kind": "rows"})
        _, name = parse_user_block(self.folder, bytes(content[:USER_BLOCK]))
        if not self.folder.is_dir():
            self.folder.mkdir()
            sync_folder(self.folder.parent)
        if not _is_whole(self._path(name), name):
            write_whole(self._path(name), content)
        shard.name, shard.held = name, None
        self._written.add(shard)

    def clean(self, listed: Iterable[str]) -> None:
        """Remove the files that are neither listed nor needed by a checkpoint that is still to be written."""
        stay = {*listed, *(shard.name for shard in self._written)}
        for path in self.folder.glob("*.h5"):
            if _NAME.fullmatch(path.stem) and path.stem not in stay:
                path.unlink(missing_ok=True)

    def paths(self, abouts: Iterable[dict[str, Any] | None]) -> list[Path]:
        """Return the existing row files that are listed in these descriptions of checkpoints."""
        return [path for name in names_of(abouts) if (path := self._path(name)).is_file() and not path.is_symlink()]

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.h5"


def names_of(abouts: Iterable[dict[str, Any] | None]) -> list[str]:
    """Return the names of the shards that are listed in these descriptions of checkpoints, without duplicates."""
    listed = [about["rows"] for about in abouts if about and isinstance(about.get("rows"), list)]
    return list(dict.fromkeys(n for names in listed for n in names if isinstance(n, str) and _NAME.fullmatch(n)))


def rows_of(checkpoint: Path) -> Callable[[str], Tensor]:
    """Return a function that reads a shard of a checkpoint by name, with a cache.

    The function raises CheckpointError with the file and the reason.
    """
    folder = checkpoint.parent.parent if checkpoint.parent.name == BEST else checkpoint.parent

    @functools.cache
    def read(name: str) -> Tensor:
        if not _NAME.fullmatch(name):
            raise CheckpointError(f"{checkpoint}: lists rows {name!r:.80}, which is not a valid name")
        return _read(checkpoint, inside(folder, ROWS) / f"{name}.h5")

    return read


def _read(checkpoint: Path, path: Path) -> Tensor:
    if not path.exists():
        raise CheckpointError(
            f"{checkpoint}: its rows {path} are missing; copy the folder {ROWS}/ together with a checkpoint"
        )
    try:
        content = read_sealed(path)
        if parse_user_block(path, bytes(content[:USER_BLOCK]))[1] != path.stem:
            raise StoreError(f"{path}: its rows do not match the hash in its name")
        state, _ = decode_state(content)
        if not isinstance(state, dict) or not isinstance(state.get("rows"), Tensor):
            raise StoreError(f"{path}: has no rows")
        return state["rows"]
    except (StoreError, ValueError) as error:
        raise CheckpointError(f"{checkpoint}: its rows cannot be read: {error}") from error


def _is_whole(path: Path, name: str) -> bool:
    try:
        return path.is_file() and parse_user_block(path, bytes(read_sealed(path)[:USER_BLOCK]))[1] == name
    except StoreError:
        return False
