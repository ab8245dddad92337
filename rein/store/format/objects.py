"""Create HDF5 objects with h5py's low-level API: the same objects as with its high-level API, in a third of the time.

A trajectory file has hundreds of objects and attributes. In short runs they took more time than the data.
"""

from __future__ import annotations

import functools
import itertools
import zlib
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote, unquote

import h5py
import numpy as np
from h5py import h5a, h5d, h5g, h5o, h5p, h5s, h5t  # type: ignore[attr-defined]  # no stubs

_LEVEL = 1  # of gzip
_TEXT = h5py.string_dtype()
_READABLE = " !#$&'()*+,;=:@[]{}<>|^"  # characters that names of metrics and clocks keep


def add_group(parent: h5py.Group, name: str, nexus_class: str, **attributes: Any) -> h5py.Group:
    """Create a group with its NeXus class. Viewers that know NeXus ignore groups without one."""
    group = h5py.Group(h5g.create(parent.id, name.encode(), _link_properties(name)))
    set_attributes(group, NX_class=nexus_class, **attributes)
    return group


def add_dataset(
    group: h5py.Group, name: str, array: np.ndarray, *, chunks: tuple[int, ...] | None = None
) -> h5py.Dataset:
    """Create and write a dataset: contiguous, or in chunks of shape `chunks` with shuffle and gzip.

    Every chunk is compressed. HDF5's filter would store chunks uncompressed that compression does not shrink.
    """
    dataset = allocate(group, name, array.shape, array.dtype, chunks)
    if chunks is None:
        dataset.id.write(h5s.ALL, h5s.ALL, np.ascontiguousarray(array) if array.ndim else array)
        return dataset
    for first in itertools.product(*map(range, (0,) * array.ndim, array.shape, chunks)):
        part = array[tuple(slice(a, a + size) for a, size in zip(first, chunks, strict=True))]
        if part.shape != chunks:  # HDF5 pads the last chunks
            part = np.pad(part, [(0, whole - size) for whole, size in zip(chunks, part.shape, strict=True)])
        dataset.id.write_direct_chunk(first, _compress(part))
    return dataset


def _compress(chunk: np.ndarray) -> bytes:
    """Return a chunk in the encoding of HDF5's filters shuffle and gzip."""
    bytes_VW = np.ascontiguousarray(chunk).reshape(-1, 1).view(np.uint8)
    return zlib.compress(np.ascontiguousarray(bytes_VW.T).data, _LEVEL)


def allocate(
    group: h5py.Group, name: str, shape: tuple[int, ...], dtype: np.dtype, chunks: tuple[int, ...] | None = None
) -> h5py.Dataset:
    """Create a dataset without writing data."""
    created = h5d.create(
        group.id, name.encode(), _type(dtype), _space(shape), _properties(chunks), _link_properties(name)
    )
    return h5py.Dataset(created)


def write_rows(dataset: h5py.Dataset, first: int, rows: np.ndarray) -> None:
    """Write `rows` to a dataset, beginning at its row `first`."""
    place = dataset.id.get_space()
    place.select_hyperslab((first, *(0,) * (rows.ndim - 1)), rows.shape)
    dataset.id.write(h5s.create_simple(rows.shape), place, np.ascontiguousarray(rows))


def add_text(group: h5py.Group, name: str, text: str) -> None:
    """Add a string dataset of fixed length, because PyTables cannot read others."""
    data = text.encode()
    kind = _text_type(len(data))
    created = h5d.create(group.id, name.encode(), kind, _space(()), _properties(None), _link_properties(name))
    created.write(h5s.ALL, h5s.ALL, np.array(data), mtype=kind)


def set_attributes(node: h5py.Group | h5py.Dataset, **attributes: str | Sequence[str] | int) -> None:
    """Create attributes: a string, a list of strings or an integer."""
    for name, value in attributes.items():
        array = np.array(value, None if isinstance(value, int) else _TEXT)
        attribute = h5a.create(node.id, name.encode(), _type(array.dtype), _space(array.shape))
        attribute.write(array, mtype=_type(array.dtype, memory=True))


def link(group: h5py.Group, name: str, target: h5py.Group | h5py.Dataset) -> None:
    """Create a hard link to an object in the same file."""
    h5o.link(target.id, group.id, name.encode(), lcpl=_link_properties(name))


def encode_name(name: str) -> str:
    """Encode a metric's name as the name of a dataset. "/", which HDF5 reserves, becomes %2F."""
    return quote(name, safe=_READABLE) if name.strip(".") else name.replace(".", "%2E")


def decode_name(name: str) -> str:
    """Invert `encode_name`."""
    return unquote(name)


@functools.lru_cache(64)
def _type(dtype: np.dtype, memory: bool = False) -> h5t.TypeID:
    """Return the HDF5 type. As in h5py, booleans are an enumeration and strings are UTF-8 of variable length."""
    return h5t.py_create(_TEXT if dtype.kind == "O" else dtype, logical=not memory)


@functools.lru_cache(64)
def _space(shape: tuple[int, ...]) -> h5s.SpaceID:
    """Return a cached dataspace. Callers must not change its selection."""
    return h5s.create_simple(shape) if shape else h5s.create(h5s.SCALAR)


@functools.lru_cache(64)
def _text_type(length: int) -> h5t.TypeID:
    return h5t.py_create(h5py.string_dtype(length=length), logical=True)


@functools.lru_cache(64)  # bounded, because chunk shapes vary with the number of rows
def _properties(chunks: tuple[int, ...] | None) -> Any:
    properties = h5p.create(h5p.DATASET_CREATE)
    properties.set_obj_track_times(False)  # equal data gives equal bytes
    if chunks is not None:
        properties.set_chunk(chunks)
        properties.set_shuffle()
        properties.set_deflate(_LEVEL)
    return properties


def _link_properties(name: str) -> Any:
    return None if name.isascii() else _of_unicode()


@functools.cache
def _of_unicode() -> Any:
    properties = h5p.create(h5p.LINK_CREATE)
    properties.set_char_encoding(h5t.CSET_UTF8)
    return properties
