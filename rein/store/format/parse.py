"""What an HDF5 file of trajectories holds, and where in the file: all that is ever asked of HDF5's parser.

`rein.store.format.scan` runs this file as a program of its own, with limits, for a hostile file can crash the parser or
keep it busy for ever. It imports nothing of rein's, so it starts in a tenth of a second.
"""

from __future__ import annotations

import codecs
import importlib
import json
import os
import sys
from typing import Any

import h5py
from h5py import h5l  # pyright: ignore[reportAttributeAccessIssue]  # compiled, without stubs

# Windows has none; there the caller's deadline is all
resource: Any = importlib.import_module("resource") if os.name == "posix" else None

ROOTS = ("epochs", "episodes", "trajectory")

_DEPTH = 32
_LINK = 100  # bytes that a link to a group or a dataset takes at least
_NODES = 10_000  # groups and datasets that there may be in any file
_MEMORY = 512 << 20  # bytes that the parser may take beside what Python needs
_SECONDS = 10  # of processor time for one file

Node = list[Any]  # ["group", {name: Node}] or ["dataset", {...}]


def open_hdf5(path: str) -> h5py.File:
    """A finished file, which never changes: there is nothing to lock.

    Where it is open in this process already, HDF5 wants it opened in the same way.
    """
    ways: list[Any] = [False, None]
    for locking in ways:
        try:
            return h5py.File(path, "r", locking=locking)
        except OSError as error:
            if "locking" not in str(error):
                raise
    return h5py.File(path, "r", locking=True)


def describe(path: str) -> dict[str, Node]:
    """Every dataset in `/entry/epochs`, `episodes` and `trajectory`: shape, type, and where its bytes lie.

    Follows no link but hard ones and reads no data. Raises ValueError, KeyError, OSError, ... for what is laid out
    otherwise.
    """
    with open_hdf5(path) as file:
        _allow_files(False)  # whatever the file says, no other one is opened
        try:
            entry = _child(file, "entry")
            left = [min(_NODES, file.id.get_filesize() // _LINK)]
            return {name: _describe(_child(entry, name), left, 0) for name in ROOTS}
        finally:
            _allow_files(True)


def _child(group: Any, name: str) -> Any:
    if not isinstance(group, h5py.Group):
        raise ValueError(f"{group.name} is no group")
    link = name.encode("utf-8", "surrogateescape")
    if not group.id.links.exists(link):
        raise ValueError(f"there is no {name!r} in {group.name}")
    if group.id.links.get_info(link).type != h5l.TYPE_HARD:
        raise ValueError(f"{name!r} in {group.name} is a link to elsewhere")
    return group[name]


def _describe(node: Any, left: list[int], depth: int) -> Node:
    left[0] -= 1
    if left[0] < 0 or depth > _DEPTH or (isinstance(node, h5py.Group) and len(node) > left[0]):
        raise ValueError("it has more groups and datasets than such a file can hold")
    if isinstance(node, h5py.Group):
        return ["group", {name: _describe(_child(node, name), left, depth + 1) for name in list(node)}]
    if isinstance(node, h5py.Dataset):
        return ["dataset", _describe_dataset(node)]
    raise ValueError(f"{node.name} is neither a group nor a dataset")


def _describe_dataset(dataset: Any) -> dict[str, Any]:
    plist, name = dataset.id.get_create_plist(), dataset.name
    if plist.get_layout() == h5py.h5d.VIRTUAL or plist.get_external_count():
        raise ValueError(f"the data of {name} lie in other files")
    if dataset.shape is None:
        raise ValueError(f"{name} has no shape")
    if not dataset.id.get_type().equal(h5py.h5t.py_create(dataset.dtype, logical=True)):
        raise ValueError(f"{name} is of a type that rein does not write")
    described = {"shape": dataset.shape, "dtype": dataset.dtype.str}
    if plist.get_layout() == h5py.h5d.CONTIGUOUS:
        return described | {"offset": dataset.id.get_offset()}
    if plist.get_layout() != h5py.h5d.CHUNKED:
        raise ValueError(f"{name} is stored in a way that rein does not use")
    chunks: list[Any] = []
    dataset.id.chunk_iter(chunks.append)
    if any(chunk.filter_mask for chunk in chunks):
        raise ValueError(f"{name} has a chunk that skips a filter")
    filters = [plist.get_filter(i)[0] for i in range(plist.get_nfilters())]
    places = [[chunk.byte_offset, chunk.size, *chunk.chunk_offset] for chunk in chunks]
    return described | {"chunk": dataset.chunks, "chunks": places, "filters": filters}


def _allow_files(allowed: bool) -> None:
    """Where this is a process of its own: whether anything more may be opened."""
    if __name__ == "__main__" and resource:
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (_files if allowed else 0, hard))


def _limit_memory() -> None:
    if resource and sys.platform == "linux":  # elsewhere the system does not count
        with open("/proc/self/statm") as file:
            taken = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (taken + _MEMORY, taken + _MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _limit_time() -> None:
    if resource:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
        resource.setrlimit(resource.RLIMIT_CPU, (int(usage.ru_utime + usage.ru_stime) + _SECONDS, hard))


def main() -> None:
    """For each path in a line of standard input: a line with its description, or with what is wrong with it."""
    _limit_memory()
    codecs.lookup("ascii")  # which h5py needs, and Python would open when files can no longer be opened
    for path in json.loads(sys.stdin.readline()):
        _limit_time()
        try:
            answer: Any = {"found": describe(path)}
        except Exception as error:  # whatever a hostile file makes of h5py is an answer
            answer = {"wrong": f"{error!s:.500}"}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    _files = resource.getrlimit(resource.RLIMIT_NOFILE)[0] if resource else 0
    main()
