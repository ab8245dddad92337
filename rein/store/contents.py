"""Trajectory files opened one by one: hash, layout and tables."""

from __future__ import annotations

from pathlib import Path

from rein.errors import StoreError
from rein.store.format import files
from rein.store.format.layout import read_layout
from rein.store.format.mapping import MappedFile, Stamp, stamp_of
from rein.store.format.tables import Content, read_content

MISREAD = (KeyError, ValueError, TypeError, AttributeError, IndexError)  # what odd files cause


def open_content(path: Path) -> Content:
    """Check the hash, the layout and the tables of a file, and return the tables. Raises StoreError."""
    stamp = stamp_of(path)
    files.verify(path)
    return content_of(path, stamp)


def content_of(path: Path, stamp: Stamp) -> Content:
    """Return the tables of a file whose hash was right when its `stamp` was taken. Raises StoreError."""
    file = MappedFile(path, stamp, read_layout(path))
    try:
        return read_content(file)
    except MISREAD as error:
        raise StoreError(f"{path}: is not laid out as a trajectory file: {error}") from error
    finally:
        file.unmap()  # tables are copies, and often nothing else of a file is read
