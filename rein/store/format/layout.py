"""Layout of a trajectory file: the shape, type and position of every dataset, as JSON behind the HDF5 part.

The writer records the positions that HDF5 has chosen (`describe`). Readers use only these positions, so they never call
HDF5's parser, which a hostile file can crash or hang. The hash of the file covers the layout. `read_layout` checks the
layout too, because a hash does not prove who wrote a file.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np

from rein.errors import StoreError
from rein.files import decode_json, open_file
from rein.store.format.sealed import USER_BLOCK

CHUNK = 1 << 20  # bytes of a chunk, unless one entry is larger
MAX_ROWS = 4 << 20  # rows of all environments in a file; a larger file may have one for each of its bytes

_ROOTS = ("epochs", "episodes", "trajectory")
_FILTERS = ["shuffle", "gzip"]  # of every chunk
_TYPE = re.compile(r"[<>|]([biu][1248]|f[248]|S\d{1,4})")
_DIMENSIONS = 32
_DEPTH = 32  # of nested groups
_HEADER = 256  # bytes; HDF5 takes more for a dataset without its data
_ENTRIES = 1 << 48  # of a dataset
_DEFLATE_RATIO = 1032  # the largest ratio of decompressed to compressed bytes that deflate can reach
_LONGEST = 16 << 20  # bytes of JSON
_END = "\n#rein-layout {:018d}\n"  # the last line of the file: length of the JSON in front of it
_END_PATTERN = re.compile(rb"\n#rein-layout (\d{18})\n")
_END_LENGTH = len(_END.format(0))


class Stored(NamedTuple):
    """Dataset in a file: shape, type and position."""

    shape: tuple[int, ...]
    dtype: np.dtype
    offset: int = 0  # of a contiguous dataset
    chunk: tuple[int, ...] | None = None  # shape of a chunk; None if the dataset is contiguous
    pieces: np.ndarray | None = None  # (C, 2 + dimensions) int64: offset, length and first index of each chunk

    @property
    def is_raw(self) -> bool:
        """Whether the bytes in the file can be used as they are. Booleans are checked, since a byte may be 2."""
        return self.chunk is None and self.dtype.kind != "b"

    @property
    def nbytes(self) -> int:
        """Bytes of all entries in memory."""
        return math.prod(self.shape) * self.dtype.itemsize


Tree = dict[str, Any]  # name -> Stored, or the Tree of a group


def describe(file: h5py.File) -> bytes:
    """Return the layout of a trajectory file that h5py has just written, ready to be appended to the file."""
    entry: Any = file["entry"]
    datasets: dict[str, Any] = {}
    for root in _ROOTS:
        entry[root].visititems(
            lambda name, node, root=root: datasets.update(
                {f"{root}/{name}": _describe(node)} if isinstance(node, h5py.Dataset) else {}
            )
        )
    return encode({"datasets": datasets})


def encode(layout: Mapping[str, Any]) -> bytes:
    """Return the JSON of a layout and the line that ends the file."""
    text = json.dumps(layout, separators=(",", ":")).encode()
    return text + _END.format(len(text)).encode()


def _describe(dataset: h5py.Dataset) -> dict[str, Any]:
    described: dict[str, Any] = {"shape": dataset.shape, "dtype": dataset.dtype.str}
    if dataset.chunks is None:
        return described | {"offset": dataset.id.get_offset() or 0}
    chunks: list[Any] = []
    dataset.id.chunk_iter(chunks.append)
    chunks.sort(key=lambda chunk: chunk.chunk_offset)
    places = [[chunk.byte_offset, chunk.size] for chunk in chunks]
    return described | {"chunk": dataset.chunks, "filters": _FILTERS, "chunks": places}


def read_layout(path: Path) -> Tree:
    """Return the datasets of a file: the groups `epochs`, `episodes` and `trajectory`. Raises StoreError.

    Datasets lie inside the file and do not overlap, so reading all of them is bounded by the size of the file. Check
    the hash of the file first, with `rein.store.format.sealed.verify`.
    """
    try:
        text, size = read_json(path)
        return _checked_datasets(decode_json(text)["datasets"], size)
    except OSError as error:
        raise StoreError(f"{path}: cannot be read: {error.strerror}") from error
    except (KeyError, ValueError, TypeError, AttributeError, OverflowError, MemoryError) as error:
        raise StoreError(f"{path}: is not a valid trajectory file: {error!s:.500}") from error


def read_json(path: Path) -> tuple[bytes, int]:
    """Return the JSON behind the HDF5 part, and the size of the file. Raises ValueError if the file has none."""
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(max(0, size - _END_LENGTH))
        match = _END_PATTERN.fullmatch(file.read(_END_LENGTH))
        if match is None:
            raise ValueError("it has no layout at its end, so it is not a trajectory file of rein")
        length = int(match[1])
        if length > min(_LONGEST, size - _END_LENGTH - USER_BLOCK):
            raise ValueError(f"its layout has {length:,} bytes, more than the file or {_LONGEST:,} bytes")
        file.seek(size - _END_LENGTH - length)
        return file.read(length), size


def _checked_datasets(datasets: Any, size: int) -> Tree:
    """Return the tree of datasets, all of which lie inside a file of `size` bytes. Raises ValueError otherwise."""
    tree: Tree = {"epochs": {"metrics": {}, "clocks": {}}, "episodes": {}, "trajectory": {}}
    taken: list[np.ndarray] = []
    if len(datasets) > size // _HEADER:
        raise ValueError(f"it has {len(datasets):,} datasets, more than its size allows")
    for path, described in datasets.items():
        *groups, name = path.split("/")
        path.encode()  # raises ValueError for names that cannot be printed
        if len(groups) > _DEPTH or not groups or groups[0] not in _ROOTS or "\0" in path or "" in (*groups, name):
            raise ValueError(f"{path!r:.80} is not a path of a dataset")
        group = tree
        for part in groups:
            group = group.setdefault(part, {})
            if isinstance(group, Stored):
                raise ValueError(f"{path!r:.80} is inside a dataset")
        if group.get(name):
            raise ValueError(f"{path!r:.80} is a group and a dataset")
        group[name], places = _checked(described, size, path)
        taken.append(places)
    _check_overlap(np.concatenate([np.zeros((0, 2), np.int64), *taken]))
    rows = max((math.prod(max(1, n) for n in stored.shape[:2]) for stored in _leaves(tree)), default=0)
    if rows > max(MAX_ROWS, size):
        raise ValueError(f"it has {rows:,} rows, more than the {max(MAX_ROWS, size):,} that its size allows")
    return tree


def _leaves(tree: Tree) -> Iterator[Stored]:
    for node in tree.values():
        yield from [node] if isinstance(node, Stored) else _leaves(node)


def _checked(described: Any, size: int, path: str) -> tuple[Stored, np.ndarray]:
    """Return a dataset, and the offset and length (P, 2) of each part of the file that it takes."""
    if not _TYPE.fullmatch(described["dtype"]):
        raise ValueError(f"{path:.80} is of type {described['dtype']!s:.50}, which rein does not write")
    stored = Stored(_shape(described["shape"]), np.dtype(described["dtype"]))
    if "chunk" in described:
        return _checked_chunks(stored, described, size, path)
    if stored.nbytes == 0:
        return stored, np.zeros((0, 2), np.int64)
    offset = _inside(described["offset"], stored.nbytes, size, path)
    return stored._replace(offset=offset), np.array([[offset, stored.nbytes]])


def _checked_chunks(stored: Stored, described: Any, size: int, path: str) -> tuple[Stored, np.ndarray]:
    chunk = _shape(described["chunk"])
    if len(chunk) != len(stored.shape) or not all(chunk) or described["filters"] != _FILTERS:
        raise ValueError(f"{path:.80} is compressed in a way that rein does not use")
    grid = [-(-rows // step) for rows, step in zip(stored.shape, chunk, strict=True)]
    if len(described["chunks"]) != math.prod(grid):
        raise ValueError(f"{path:.80} has {len(described['chunks'])} of {math.prod(grid)} chunks")
    nbytes = math.prod(chunk) * stored.dtype.itemsize
    if nbytes > max(CHUNK, math.prod(stored.shape[2:] or stored.shape[1:]) * stored.dtype.itemsize):
        raise ValueError(f"{path:.80} has chunks of {nbytes:,} bytes, more than rein writes")
    for offset, length in described["chunks"]:
        _inside(offset, length, size, path)
        if nbytes > _DEFLATE_RATIO * length:
            raise ValueError(f"{path:.80} has a chunk of {length:,} bytes that cannot hold {nbytes:,}")
    places = np.array(described["chunks"], np.int64).reshape(-1, 2)
    index = np.unravel_index(np.arange(len(places)), grid) if len(places) else [np.zeros(0, np.int64)] * len(grid)
    first = np.stack(index, axis=1) * np.array(chunk, np.int64)
    return stored._replace(chunk=chunk, pieces=np.concatenate([places, first], axis=1)), places


def _check_overlap(places: np.ndarray) -> None:
    begin, length = places[np.argsort(places[:, 0], kind="stable")].T
    if (begin[1:] < (begin + length)[:-1]).any():
        raise ValueError("its datasets overlap")


def _shape(shape: Any) -> tuple[int, ...]:
    if not isinstance(shape, list) or len(shape) > _DIMENSIONS or any(type(n) is not int or n < 0 for n in shape):
        raise ValueError(f"{shape!r:.80} is not a shape")
    if math.prod(max(1, n) for n in shape) > _ENTRIES:  # NumPy has no such array, even if it takes no bytes
        raise ValueError(f"{shape!r:.80} is too large for a shape")
    return tuple(shape)


def _inside(offset: Any, length: Any, size: int, path: str) -> int:
    if type(offset) is not int or type(length) is not int:
        raise ValueError(f"{path:.80} has an offset or a length that is not an integer")
    if offset < USER_BLOCK or length < 0 or offset + length > size:
        raise ValueError(f"{path:.80} lies outside the file")
    return offset
