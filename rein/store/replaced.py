"""Trajectory files that another one has replaced, so that every epoch is there once at any moment.

A file that replaces others names them, and the hash of each, behind its HDF5 part. From the moment at which it has its
own name they count no more, whether they were removed already or not.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from rein.errors import StoreError
from rein.files import open_file
from rein.store.format.files import USER_BLOCK, promised_hash

_END = "#rein-replaces {:018d}\n"  # how long the lines before it are
_END_PATTERN = re.compile(rb"#rein-replaces (\d{18})\n")
_LINE = re.compile(rb"([0-9a-z.-]{1,80}) ([0-9a-f]{64})")
_LENGTH = len(_END.format(0))


def say_replaced(paths: Sequence[Path]) -> bytes:
    """What stands at the end of the file that replaces these."""
    lines = "".join(f"{path.name} {promised_hash(path)}\n" for path in paths).encode()
    return b"\n" + lines + _END.format(len(lines)).encode()


def find_replaced(paths: Sequence[Path], by: Sequence[Path]) -> dict[Path, Path]:
    """Those of `paths` that one of the files `by` has replaced, and which one it was."""
    known, found = {path.name: path for path in paths}, {}
    for path in by:
        for name, sha256 in _read(path):
            other = known.get(name)
            if other is not None and other != path and _is(other, sha256):
                found[other] = path
    return found


def _is(path: Path, sha256: str) -> bool:
    try:
        return promised_hash(path) == sha256
    except StoreError:
        return not path.exists()  # it was removed just now


def _read(path: Path) -> Iterator[tuple[str, str]]:
    """Names and hashes of what the file says that it replaces; nothing where it says nothing, or is gone."""
    try:
        with open_file(path) as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - _LENGTH))
            match = _END_PATTERN.fullmatch(file.read())
            length = int(match[1]) if match else 0
            start = size - _LENGTH - length
            file.seek(max(0, start))
            lines = file.read(length).splitlines() if start >= USER_BLOCK else []
    except OSError:
        return
    for line in lines:
        if told := _LINE.fullmatch(line):
            yield told[1].decode(), told[2].decode()
