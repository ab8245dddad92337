"""Lines of text for a terminal, a file or a pipe that may not take them."""

from __future__ import annotations

import sys
from typing import TextIO


def write_line(text: str, file: TextIO | None = None) -> Exception | None:
    """Write a line to `file`, standard output by default, and return the error if it cannot be written.

    Characters that the encoding of the file does not have are written as escapes.
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
