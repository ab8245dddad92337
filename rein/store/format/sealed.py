"""Sealed files: HDF5 composed in memory, written atomically, and checked by a hash when they are read.

h5py writes into memory (`compose`), and plain system calls write the file (`write_whole`). libhdf5 would end the
process if the disk is full, and leave an unreadable file if the process is killed. The HDF5 part follows a user block
of 512 bytes, which HDF5 readers skip. It has the format version, the length of the rest and its SHA-256 as plain text:
`head -c 512 FILE` shows it, and `tail -c +513 FILE | sha256sum` checks the hash.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch

from rein.errors import StoreError
from rein.files import LARGEST, open_file
from rein.replay.storage import free_bytes

FORMAT = 2  # of the user block and of everything behind it; incremented when an older rein could not read the file
USER_BLOCK = 512
ALIGNMENT = 64  # bytes; a cache line, for vectorized loads from a memory map

_HINT = b"The HDF5 image begins at byte 512; check it with: tail -c +513 FILE | sha256sum\n"
_HEADER = re.compile(rb"#rein-hdf5 format (\d{1,9})\nlength (\d{1,18})\nsha256 ([0-9a-f]{64})\n")
_TEMPORARY = re.compile(r"\..+\.tmp-(\d{1,9})")
_RESERVE = 4 << 20  # bytes in addition to the data and the growth of its buffer

_being_written: set[str] = set()  # temporary files that threads of this process are writing


def write_whole(path: Path, data: bytes | memoryview) -> None:
    """Write `data` to `path` atomically. The file is safe on the disk when this function returns.

    Raises StoreError with the path and the system's reason, before writing if the disk has no room. On an error, no
    temporary file remains.
    """
    temporary = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    _being_written.add(str(temporary))
    try:
        check_room(path.parent, len(data))
        _write(temporary, memoryview(data))
        os.replace(temporary, path)
        sync_folder(path.parent)
    except BaseException as error:  # always remove the temporary file
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        if not isinstance(error, OSError):
            raise
        advice = "; free some space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        raise StoreError(f"{path}: {len(data):,} bytes could not be written: {reason_of(error)}{advice}") from error
    finally:
        _being_written.discard(str(temporary))


def check_room(folder: Path, size: int) -> None:
    """Raise OSError if the disk of `folder` has no room for `size` more bytes.

    Does nothing on Windows and on network disks that do not report their size.
    """
    try:
        room = os.statvfs(folder)
    except (OSError, AttributeError):  # the write will report an error
        return
    blocks = room.f_bfree if os.geteuid() == 0 else room.f_bavail  # some blocks are reserved for the superuser
    free = blocks * room.f_frsize
    if room.f_blocks and free < size:
        mebibytes = f"{size / 2**20:,.1f} MiB are needed, {free / 2**20:,.1f} MiB are free"
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {mebibytes}")


def reason_of(error: OSError) -> str:
    """Return the system's message and error number."""
    return f"{error.strerror} (errno {error.errno})"


def user_block(length: int, sha256: str) -> bytes:
    """Return the 512-byte user block for an HDF5 image with this length and hash."""
    lines = f"#rein-hdf5 format {FORMAT}\nlength {length}\nsha256 {sha256}\n".encode()
    return (lines + _HINT).ljust(USER_BLOCK, b"\0")


def verify(path: Path) -> None:
    """Check the length and the hash of a file. Raises StoreError with the path and the reason."""
    with _open_checked(path) as (file, sha256):
        _compare(path, hashlib.file_digest(file, "sha256").hexdigest(), sha256)


def promised_hash(path: Path) -> str:
    """Return the SHA-256 in a file's user block. Checks only the length of the file. Raises StoreError."""
    with _open_checked(path) as (_, sha256):
        return sha256


def read_sealed(path: Path) -> bytearray:
    """Read a complete sealed file and check its length and hash. Raises StoreError."""
    free = free_bytes(torch.device("cpu"))
    with _open_checked(path, LARGEST if free is None else min(free, LARGEST)) as (file, sha256):
        size = os.fstat(file.fileno()).st_size
        file.seek(0)
        content = bytearray(size)
        if file.readinto(content) != size:
            raise StoreError(f"{path}: was truncated while it was read")
        _compare(path, hashlib.sha256(memoryview(content)[USER_BLOCK:]).hexdigest(), sha256)
    return content


@contextlib.contextmanager
def _open_checked(path: Path, limit: int = LARGEST) -> Iterator[tuple[io.BufferedReader, str]]:
    """Open a file, check its length, and yield it positioned after its user block, with the hash that it must have."""
    try:
        with open_file(path, limit=limit) as file:
            length, sha256 = parse_user_block(path, file.read(USER_BLOCK))
            size = os.fstat(file.fileno()).st_size - USER_BLOCK
            if size != length:
                raise StoreError(f"{path}: was truncated or extended: it has {size} bytes instead of {length}")
            yield file, sha256
    except OSError as error:
        raise StoreError(f"{path}: cannot be read: {error.strerror}") from error


def _compare(path: Path, sha256: str, promised: str) -> None:
    if sha256 != promised:
        raise StoreError(f"{path}: is damaged: its SHA-256 is not the one in its user block")


def remove_leftovers(folder: Path) -> list[Path]:
    """Remove the temporary files of dead processes in `folder`. Returns the removed files."""
    removed = []
    for entry in folder.iterdir() if folder.is_dir() else ():
        match = _TEMPORARY.fullmatch(entry.name)
        if match and _is_stale(entry, int(match[1])):
            with contextlib.suppress(FileNotFoundError):  # another process has removed it
                entry.unlink()
            removed.append(entry)
    return removed


def sync_folder(folder: Path) -> None:
    """Make renames in `folder` durable. Does nothing on Windows."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write(path: Path, rest: memoryview) -> None:
    with contextlib.suppress(FileNotFoundError):  # left by a dead process with the same pid, or a planted link
        os.unlink(path)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o666)
    try:
        while rest:
            try:
                written = os.write(descriptor, rest)
            except InterruptedError:
                continue
            if written == 0:
                raise OSError(errno.EIO, "the system accepts no more bytes")
            rest = rest[written:]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def parse_user_block(path: Path, block: bytes) -> tuple[int, str]:
    """Return the length and the hash in a user block. Raises StoreError if the block is invalid."""
    match = _HEADER.match(block)
    if match is None:
        raise StoreError(f"{path}: has no user block of rein: it was written by another program, or is damaged")
    if int(match[1]) != FORMAT:
        raise StoreError(f"{path}: has format version {int(match[1])}; this rein reads version {FORMAT}")
    length, sha256 = int(match[2]), match[3].decode()
    if block != user_block(length, sha256):
        raise StoreError(f"{path}: is damaged: its user block is invalid")
    return length, sha256


def _is_stale(temporary: Path, pid: int) -> bool:
    """Return whether no process writes that temporary file any longer."""
    if pid == os.getpid():  # in containers, an earlier run may have had the same pid
        return str(temporary) not in _being_written
    if os.name == "nt":  # signal 0 would end the process there
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except (PermissionError, OverflowError):  # a process of another user, or not a valid pid
        pass
    return False


class _Memory(io.BytesIO):
    """File object in memory for HDF5, which extends files with `truncate`."""

    def truncate(self, size: int | None = None) -> int:
        """Set the length to `size`. New bytes are zero."""
        end = self.seek(0, os.SEEK_END)
        self.write(bytes(max(0, (size or 0) - end)))
        return super().truncate(size)


def compose(build: Callable[[h5py.File], Any], capacity: int = 0, trailer: Callable[[], bytes] = bytes) -> memoryview:
    """Compose a sealed file in memory and return its bytes. Nothing is written to the disk.

    Args:
        build: function that fills the HDF5 file.
        capacity: approximate number of bytes of data. A lack of memory must raise here, because HDF5 can crash if a
            write fails.
        trailer: function that returns bytes to append after the HDF5 part, where HDF5 readers do not look. The hash
            covers them.

    The default `libver` makes the file readable for every HDF5 version. Contiguous datasets are aligned for memory
    maps. HDF5's in-memory driver (`core`) is ten times slower than a file object.
    """
    np.empty(capacity + capacity // 4 + _RESERVE, np.uint8)  # raises MemoryError
    memory = _Memory()
    aligned = {"alignment_threshold": 1, "alignment_interval": ALIGNMENT}
    with h5py.File(memory, "w", userblock_size=USER_BLOCK, **aligned) as file:  # type: ignore[arg-type]  # h5py accepts file objects
        build(file)
    memory.seek(0, os.SEEK_END)
    memory.write(trailer())
    content = memory.getbuffer()
    sha256 = hashlib.sha256(content[USER_BLOCK:]).hexdigest()
    content[:USER_BLOCK] = user_block(len(content) - USER_BLOCK, sha256)
    return content
