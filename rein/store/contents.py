"""Files of trajectories opened one by one: hash, scan and tables."""

from __future__ import annotations

from pathlib import Path

from rein.errors import StoreError
from rein.store.format.mapping import MappedFile, Stamp
from rein.store.format.scan import Layout
from rein.store.format.tables import Content, read_content

MISREAD = (KeyError, ValueError, TypeError, AttributeError, IndexError)  # what odd files cause


def content_of(path: Path, stamp: Stamp, layout: Layout) -> Content:
    """The tables of a file that was scanned. Raises StoreError where they make no sense."""
    file = MappedFile(path, stamp, layout)
    try:
        return read_content(file)
    except MISREAD as error:
        raise StoreError(f"{path}: is not laid out as a file of trajectories: {error}") from error
    finally:
        file.unmap()  # tables are copies, and of most files of a large run nothing else is read for long
