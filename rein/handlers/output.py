"""Write lines of text to a terminal, a file or a pipe that may be closed."""

from __future__ import annotations

import sys
from typing import TextIO


def write_line(text: str, file: TextIO | None = None) -> Exception | None:
    """Write a line to `file` (default: standard output). Return the error if it cannot be written, otherwise None.

    Characters that the encoding of the file lacks are escaped.
    """
    file = sys.stdout if file is None else file
    try:
        try:
            print(text, file=file, flush=True)
        except UnicodeEncodeError as error:
            print(text.encode(error.encoding, "backslashreplace").decode(error.encoding), file=file, flush=True)
    except Exception as error:  # a file object may raise anything
        return error
    return None
