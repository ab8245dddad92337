"""Row files: blocks of replay buffers that several checkpoints share.

Files::

    checkpoints/rows/<sha256>.h5    a block of rows, named by the hash in its user block

A block that does not change between two checkpoints is copied and written once, and both checkpoints list it. Each file
holds the state `{"rows": tensor}`, so any viewer opens it.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from torch import Tensor

from rein.errors import CheckpointError, StoreError
from rein.files import inside
from rein.ops.trees import leaves
from rein.replay.storage import Mark, mark_of
from rein.store.format.sealed import (
    USER_BLOCK,
    Memory,
    parse_user_block,
    read_sealed,
    remove_leftovers,
    sync_folder,
    write_whole,
)
from rein.store.format.state import Shard, decode_state, encode_state, hold

ROWS = "rows"
BEST = "best"
LEAST = 1 << 20  # bytes; a smaller block is stored in the checkpoint itself

_NAME = re.compile(r"[0-9a-f]{64}")


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
        self._known: weakref.WeakKeyDictionary[Mark, Shard] = weakref.WeakKeyDictionary()

    def hold(self, leaf: Any) -> Any:
        """Copy a leaf to the host. A large block of a replay buffer becomes a shard, which is copied if it is new."""
        mark = mark_of(leaf) if isinstance(leaf, Tensor) else None
        if mark is None or leaf.nbytes < LEAST:
            return hold(leaf)
        shard = self._known.get(mark)
        if shard is None:
            shard = self._known[mark] = Shard(hold(leaf))
        return shard

    def write(self, state: Any, memory: Memory) -> list[str]:
        """Write every shard in a tree that has no file yet. Returns the names of all shards in the tree.

        Raises StoreError if a file cannot be written or was removed.
        """
        names: dict[str, None] = {}
        for shard in (leaf for _, leaf in leaves(state) if isinstance(leaf, Shard)):
            if shard.held is not None:
                self._write(shard, memory)
            elif not self._path(shard.name).exists():
                raise StoreError(f"{self._path(shard.name)}: was removed, but a checkpoint needs it")
            names[shard.name] = None
        return list(names)

    def _write(self, shard: Shard, memory: Memory) -> None:
        content = encode_state({"rows": shard.held}, {"kind": "rows"}, memory)
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

    def remove_leftovers(self) -> None:
        """Remove unfinished files of dead processes."""
        remove_leftovers(self.folder)

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
    beside = checkpoint.parent.parent if checkpoint.parent.name == BEST else checkpoint.parent
    found: dict[str, Tensor] = {}

    def read(name: str) -> Tensor:
        if not _NAME.fullmatch(name):
            raise CheckpointError(f"{checkpoint}: lists rows {name!r:.80}, which is not a valid name")
        if name not in found:
            found[name] = _read(checkpoint, inside(beside, ROWS) / f"{name}.h5")
        return found[name]

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
    except (StoreError, ValueError) as error:
        raise CheckpointError(f"{checkpoint}: its rows cannot be read: {error}") from error
    return state["rows"]


def _is_whole(path: Path, name: str) -> bool:
    try:
        return path.is_file() and parse_user_block(path, bytes(read_sealed(path)[:USER_BLOCK]))[1] == name
    except StoreError:
        return False
