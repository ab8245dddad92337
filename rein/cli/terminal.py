"""Output of the command line.

A run may come from an untrusted source, and a terminal obeys escape sequences in names. Therefore only this module
prints in `rein.cli`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import sys
import warnings
from collections.abc import Iterator
from typing import Any, TextIO

_WIDEST = 10_000  # characters of a line that goes to a pipe or file
_STYLE = re.compile(r"\x1b\[[0-9;]*m")  # some libraries color their warnings


def printable(text: object, keep: str = "") -> str:
    """Replace each character that could control a terminal by a question mark, except those in `keep`."""
    plain = _STYLE.sub("", str(text))
    return "".join(character if character.isprintable() or character in keep else "?" for character in plain)


def say(thing: Any = "", *, error: bool = False, end: str = "\n", markup: bool = False) -> None:
    """Print a text, or a rich object such as a table, to standard output or standard error.

    With `markup`, a text is rich markup, whose lines are not wrapped. Escape values from files in it. If the output is
    not a terminal, lines of tables are not wrapped either.
    """
    stream: TextIO = sys.stderr if error else sys.stdout
    if isinstance(thing, str) and not markup:
        print(printable(thing, keep="\n\t"), file=stream, end=end, flush=True)
        return
    from rich.console import Console

    width = shown_width(stream)
    console = Console(file=stream, width=width or _WIDEST)
    hook: Any = _PlainText()  # rich needs only its one method
    console.push_render_hook(hook)
    with console.capture() as captured:
        console.print(thing, soft_wrap=markup)
    lines = captured.get().splitlines()
    print("\n".join(line.rstrip() for line in lines), file=stream, flush=True)  # rich pads the last column


def shown_width(stream: TextIO | None = None) -> int | None:
    """Return the width of the terminal, or None for a pipe or file. The variable COLUMNS sets the width of both."""
    if not (stream or sys.stdout).isatty() and "COLUMNS" not in os.environ:
        return None
    return shutil.get_terminal_size().columns


def restore_terminal() -> None:
    """Undo the changes of a progress bar, because a second signal may have ended it before it could do so."""
    sys.stdout, sys.stderr = (getattr(file, "rich_proxied_file", file) for file in (sys.stdout, sys.stderr))
    if sys.stdout.isatty():
        from rich.console import Console

        Console(file=sys.stdout).show_cursor()


@contextlib.contextmanager
def plain_messages() -> Iterator[None]:
    """Print warnings and otherwise unhandled log messages without escape sequences inside this context."""
    last = logging.lastResort
    format_warning = warnings.formatwarning

    def format_plain(*arguments: Any, **options: Any) -> str:
        return printable(format_warning(*arguments, **options), keep="\n\t")

    warnings.formatwarning = format_plain
    if last is not None:
        last.setFormatter(_PlainFormatter())
    try:
        yield
    finally:
        warnings.formatwarning = format_warning
        if last is not None:
            last.setFormatter(None)


class _PlainFormatter(logging.Formatter):
    """Formats a log message without escape sequences."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the message, with its traceback if there is one."""
        return printable(super().format(record), keep="\n\t")


class _PlainText:
    """Render hook of rich that replaces control characters in texts and keeps styles."""

    def process_renderables(self, renderables: list[Any]) -> list[Any]:
        """Return the objects with printable texts."""
        return [_Plain(renderable) for renderable in renderables]


class _Plain:
    def __init__(self, renderable: Any) -> None:
        self._renderable = renderable

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        for segment in console.render(self._renderable, options):
            text = segment.text if segment.control else printable(segment.text, keep="\n")
            yield segment._replace(text=text)
