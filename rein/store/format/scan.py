"""Where the data lie in files that may be anybody's, found out without endangering this process.

HDF5's parser sees a file only in a child process with limits on time and memory; that says where each dataset lies, and
what it says is checked again here. Reading is then a matter of maps and zlib (`rein.store.format.mapping`). What was
found is remembered by a file's own hash, so each file is scanned once.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rein.errors import StoreError
from rein.files import decode_json, open_file
from rein.store.format import files, parse
from rein.store.format.image import is_own

_TYPE = re.compile(r"[<>|]([biu][1248]|f[248]|S\d{1,4})")
_FILTERS = ([], [1], [2], [2, 1])  # gzip is 1, shuffle is 2
_GROWTH = 100  # what is compressed may be that many times as large as the file
_ROOM = 128 << 20  # bytes that any file may hold, for a run's first pictures may all be black
_ROWS = 4 << 20  # rows of all environments that any file may have; in others each of them takes a byte of the file
_ENTRIES = 1 << 48  # of a dataset
_SECONDS = 60.0  # for one file: the child's own limit is on processor time, which a child that sleeps does not use
_ANSWER = 64 << 20  # bytes
_START = (
    "import json, runpy, sys; program, sys.path[:] = json.loads(sys.stdin.readline()); "
    "runpy.run_path(program, run_name='__main__')"
)


class Stored(NamedTuple):
    """A dataset: what it holds, and where in its file."""

    shape: tuple[int, ...]
    dtype: np.dtype
    offset: int = 0  # of all of it, where it is raw
    chunk: tuple[int, ...] | None = None  # the shape of a chunk; None where it is raw
    pieces: np.ndarray | None = None  # (C, 2 + dimensions) int64: offset and length in the file, first index, of each
    shuffled: bool = False
    deflated: bool = False

    @property
    def is_raw(self) -> bool:
        """Whether its bytes can be used as they lie in the file; one of 2 is no boolean of numpy's."""
        return self.chunk is None and self.dtype.kind != "b"


Layout = dict[str, Any]  # name -> Stored, or the Layout of a group

_known: dict[bytes, Layout] = {}  # by the user block, which holds the hash
_trusting = [False]
_TRUSTED = "trusted=True (or --trusted) reads it"  # how what was refused may be read after all


@contextlib.contextmanager
def trusting() -> Iterator[None]:
    """Take all files for `trusted`: for a program whose user said so of what it was given."""
    before, _trusting[0] = _trusting[0], True
    try:
        yield
    finally:
        _trusting[0] = before


def layouts(paths: Sequence[Path], trusted: bool) -> list[Layout]:
    """Where the data lie in files whose hashes are right, each scanned once.

    That is done in a child process, but for what is `trusted` or was written by this process itself.
    Raises StoreError naming the first bad file and the reason.
    """
    blocks = [_user_block(path) for path in paths]
    new = {block: path for block, path in zip(blocks, paths, strict=True) if block not in _known}
    here = {block: path for block, path in new.items() if trusted or _trusting[0] or is_own(block)}
    there = {block: path for block, path in new.items() if block not in here}
    answers = itertools.chain(map(_parse_here, here.values()), _parse_in_child(list(there.values())))
    for (block, path), answer in zip((here | there).items(), answers, strict=True):
        try:
            if "wrong" in answer:
                raise ValueError(answer["wrong"])
            _known[block] = _checked_file(answer["found"], path.lstat().st_size, limited=block in there)
        except (KeyError, ValueError, TypeError, OverflowError, OSError, RecursionError, AttributeError) as error:
            raise StoreError(f"{path}: is not laid out as a file of trajectories: {error!s:.500}") from error
    return [_known[block] for block in blocks]


def _user_block(path: Path) -> bytes:
    try:
        with open_file(path) as file:
            return file.read(files.USER_BLOCK)
    except OSError as error:
        raise StoreError(f"{path}: cannot be read: {error.strerror}") from error


def _parse_here(path: Path) -> dict[str, Any]:
    try:
        return {"found": parse.describe(str(path))}
    except (KeyError, OSError, ValueError, TypeError, RuntimeError, AttributeError) as error:
        return {"wrong": str(error)}


def _parse_in_child(paths: list[Path]) -> Iterator[dict[str, Any]]:
    """The answers of one child for all files, in their order."""
    if not paths:
        return
    command = [sys.executable, "-I", "-S", "-c", _START]
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    try:
        child = subprocess.Popen(command, env=environment, bufsize=0, **pipes)
    except OSError as error:
        raise StoreError(f"{paths[0]}: cannot be scanned: {sys.executable} does not start: {error.strerror}") from error
    try:
        _ask(child, [parse.__file__, [os.path.abspath(place) for place in sys.path]])
        _ask(child, [os.path.abspath(path) for path in paths])
        rest = b""
        for path in paths:
            line, rest = _read_line(child, path, rest)
            yield _parse_answer(line)
    finally:
        child.kill()
        child.wait()
        for pipe in (child.stdin, child.stdout):
            assert pipe is not None
            pipe.close()


def _parse_answer(line: bytes) -> dict[str, Any]:
    try:
        answer = decode_json(line)
    except ValueError as error:
        return {"wrong": f"the scan cannot be understood: {error!s:.200}"}
    return answer if isinstance(answer, dict) else {"wrong": "the scan says nothing"}


def _ask(child: Any, question: Any) -> None:
    rest = memoryview(json.dumps(question).encode() + b"\n")
    while rest:
        try:
            rest = rest[child.stdin.write(rest) :]
        except BrokenPipeError:  # what it died of is found out when its answer is missing
            return


def _read_line(child: Any, path: Path, rest: bytes) -> tuple[bytes, bytes]:
    """The next line of the child's output, and what came after it. Raises StoreError when there will be none."""
    parts, size, deadline = [rest], len(rest), time.monotonic() + _SECONDS
    while b"\n" not in parts[-1]:
        wait = deadline - time.monotonic()
        if wait <= 0 or not _is_ready(child.stdout, wait):
            raise StoreError(f"{path}: is hostile or damaged: scanning it took more than {_SECONDS:.0f} seconds")
        parts.append(os.read(child.stdout.fileno(), 1 << 20))
        size += len(parts[-1])
        if not parts[-1]:
            raise StoreError(f"{path}: {_cause(child.wait())}")
        if size > _ANSWER:
            raise StoreError(f"{path}: is hostile or damaged: it has more parts than a file of trajectories has")
    line, _, rest = b"".join(parts).partition(b"\n")
    return line, rest


def _is_ready(stream: Any, seconds: float) -> bool:
    if os.name == "nt":  # where a pipe cannot be waited for
        return True
    return bool(select.select([stream], [], [], seconds)[0])


def _cause(status: int) -> str:
    if status >= 0:
        return f"cannot be scanned: the child process ended with status {status}; {_TRUSTED} without a scan"
    if status in (-getattr(signal, "SIGXCPU", 0), -getattr(signal, "SIGKILL", 0)):
        return "is hostile or damaged: scanning it took too much time or memory"
    return f"is hostile or damaged: HDF5's parser died of it ({signal.Signals(-status).name})"


def _checked_file(found: dict[str, Any], size: int, limited: bool) -> Layout:
    """The layout in the words of this module, if all that it says can be. Raises ValueError and the like.

    What is `limited` must not take much more memory than the file has bytes, nor use any of these twice.
    """
    made: list[tuple[Stored, int]] = []
    layout = {name: _checked(["group", {name: found[name]}], size, made, name)[name] for name in parse.ROOTS}
    if not limited:
        return layout
    if sum(length for _, length in made) > max(_ROOM, _GROWTH * size):
        raise ValueError(f"its data are more than {_GROWTH} times as large as the file; {_TRUSTED}")
    if sum(map(_bytes_taken, (stored for stored, _ in made))) > size:
        raise ValueError("its data lie one over the other")
    rows = max((math.prod(max(1, n) for n in stored.shape[:2]) for stored, _ in made), default=0)
    if rows > max(_ROWS, size):
        raise ValueError(f"it has {rows:,} rows, more than a file of its size can hold; {_TRUSTED}")
    return layout


def _bytes_taken(stored: Stored) -> int:
    """How much of its file a dataset takes."""
    if stored.pieces is not None:
        return int(stored.pieces[:, 1].sum())
    return math.prod(stored.shape) * stored.dtype.itemsize


def _checked(node: Any, size: int, made: list[tuple[Stored, int]], where: str) -> Any:
    """The dataset, or the group of them, all of which are added to `made` with the bytes that they make."""
    kind, content = node
    if kind == "group":
        return {str(name): _checked(child, size, made, f"{where}/{name}") for name, child in content.items()}
    if not _TYPE.fullmatch(content["dtype"]):
        raise ValueError(f"{where} is of type {content['dtype']!s:.50}, which rein does not write")
    stored = Stored(_shape(content["shape"]), np.dtype(content["dtype"]))
    length = math.prod(stored.shape) * stored.dtype.itemsize
    if content.get("chunk") is not None:
        stored, length = _checked_chunks(stored, content, size, where)
    elif length:
        stored = stored._replace(offset=_inside(content["offset"], length, size, where))
    made.append((stored, length))
    return stored


def _checked_chunks(stored: Stored, content: Any, size: int, where: str) -> tuple[Stored, int]:
    """The dataset with its chunks, and the bytes that they make; every chunk must be there, once and inside."""
    chunk = _shape(content["chunk"])
    if len(chunk) != len(stored.shape) or not all(chunk) or content["filters"] not in _FILTERS:
        raise ValueError(f"{where} is compressed in a way that rein does not use")
    grid = [-(-rows // step) for rows, step in zip(stored.shape, chunk, strict=True)]
    if len(content["chunks"]) != math.prod(grid):
        raise ValueError(f"{where} has {len(content['chunks'])} chunks of {math.prod(grid)}")
    pieces = np.array(content["chunks"], np.int64).reshape(-1, 2 + len(chunk))
    for offset, length in pieces[:, :2].tolist():
        _inside(offset, length, size, where)
    index, uneven = np.divmod(pieces[:, 2:], np.array(chunk, np.int64))
    outside = uneven.any() or (index < 0).any() or (index >= np.array(grid)).any()
    if outside or len(np.unique(index, axis=0)) < len(index):
        raise ValueError(f"the chunks of {where} do not lie side by side")
    filters = content["filters"]
    stored = stored._replace(chunk=chunk, pieces=pieces, shuffled=2 in filters, deflated=1 in filters)
    return stored, len(pieces) * math.prod(chunk) * stored.dtype.itemsize


def _shape(shape: Any) -> tuple[int, ...]:
    if not isinstance(shape, list | tuple) or len(shape) > 32 or any(type(n) is not int or n < 0 for n in shape):
        raise ValueError("a shape that cannot be")
    if math.prod(max(1, n) for n in shape) > _ENTRIES:  # of no byte, maybe; numpy has no such array
        raise ValueError("a shape that cannot be")
    return tuple(shape)


def _inside(offset: Any, length: int, size: int, where: str) -> int:
    if type(offset) is not int or offset < files.USER_BLOCK or length < 0 or offset + length > size:
        raise ValueError(f"{where} lies outside the file")
    return offset
