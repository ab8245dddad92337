"""Paths given by users, and opening the files of a run without following links."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

from rein.errors import StoreError


def absolute(path: str | os.PathLike[str]) -> Path:
    """Return the absolute form of `path`, with `~` expanded.

    Objects that keep a path call this when they are built, so that a later `os.chdir` does not move their files.
    Symbolic links and `..` stay as they are.
    """
    return Path(path).expanduser().absolute()


def short(path: Path) -> Path:
    """Return `path` relative to the current directory if it lies there, for messages."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def followed(path: Path) -> Path:
    """Return the target of a link to a file that the user has named, and any other path as it is."""
    return path.resolve() if path.is_symlink() and path.is_file() else path


LARGEST = 64 << 30  # maximum bytes of any file
TEXT = 1 << 30  # maximum bytes of a text file, which is read as a whole
_JSON = 16 << 20  # maximum bytes of a JSON file
_VALUES = 2_000_000  # maximum number of values in a JSON text, which take up to 250 bytes of memory each
_DEEPEST = 100  # maximum nesting of JSON, so that recursive functions stay far below Python's limit
_CAREFUL = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)  # Windows has neither

_LINK = "is a symbolic link, and links inside a run's folder are not followed; replace it by its target"


def is_regular(path: Path) -> bool:
    """Whether there is a regular file: no folder, symbolic link, pipe or device."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False


def open_file(path: Path, mode: str = "rb", *, limit: int = LARGEST, buffering: int = -1) -> Any:
    """Open a file of a run, as `open` does. All files of runs are opened here, because runs are not trusted.

    Raises OSError if the path is a symbolic link, not a regular file, or larger than `limit` bytes. A pipe or device is
    refused without being opened.
    """

    def opener(name: str, flags: int) -> int:
        with contextlib.suppress(FileNotFoundError):
            _check_regular(name, limit)
        return os.open(name, flags | _CAREFUL, 0o666)

    return open(path, mode, buffering, opener=opener)


def read_file(path: Path, limit: int = TEXT) -> bytes:
    """Return all bytes of a file of a run. Raises OSError as `open_file` does."""
    with open_file(path, limit=limit) as file:
        return file.read()


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file of a run. Raises OSError as `open_file` does, ValueError for anything else."""
    value = decode_json(read_file(path, _JSON))
    if not isinstance(value, dict):
        raise ValueError(f"a JSON object was expected, not {type(value).__name__}")
    return value


def decode_json(text: bytes | str, **options: Any) -> Any:
    """Parse untrusted JSON. `options` are those of `json.loads`. Raises ValueError, also for too large or deep JSON."""
    text = text if isinstance(text, str) else text.decode()
    check_values(text)
    try:
        value = json.loads(text, **options)
    except RecursionError:
        raise ValueError(f"it is nested more than {_DEEPEST} levels deep") from None
    check_depth(value, _DEEPEST)
    return value


def check_values(text: str) -> None:
    """Raise ValueError if JSON has too many values to be read. Characters in strings may count as values."""
    if (count := sum(map(text.count, ",[{"))) > _VALUES:
        raise ValueError(f"it has {count:,} values; at most {_VALUES:,} are allowed")


def check_depth(value: Any, deepest: int) -> None:
    """Raise ValueError if dictionaries and lists are nested more than `deepest` levels deep."""
    level = [value]
    for _ in range(deepest + 1):
        inner = [node.values() if isinstance(node, dict) else node for node in level if isinstance(node, dict | list)]
        if not inner:
            return
        level = [node for nodes in inner for node in nodes]
    raise ValueError(f"it is nested more than {deepest} levels deep")


def make_folder(path: Path) -> None:
    """Create a folder and its parents if they do not exist. Raises StoreError for a link without a target."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        for folder in (path, *path.parents):
            if folder.is_symlink() and not folder.exists():
                target = os.readlink(folder)
                raise StoreError(f"{folder}: is a symbolic link to {target}, which does not exist") from None
        raise


def inside(folder: Path, *names: str) -> Path:
    """Return the path of a file or folder of a run: `inside(run, "checkpoints", "best")`.

    Raises StoreError if one of these is a symbolic link: reading, writing and deleting would act outside the run.
    `folder` itself may be a link.
    """
    for name in names:
        folder = folder / name
        if folder.is_symlink():
            raise StoreError(f"{folder}: {_LINK}")
    return folder


def _check_regular(name: str, limit: int) -> None:
    status = os.lstat(name)
    if stat.S_ISLNK(status.st_mode):
        raise OSError(errno.ELOOP, _LINK, name)
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "is not a regular file", name)
    if status.st_size > limit:
        raise OSError(errno.EFBIG, f"has {status.st_size:,} bytes; at most {limit:,} are read", name)
