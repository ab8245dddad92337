"""Write warnings, errors and the traceback of a failure to `run.log` in the folder of a run."""

from __future__ import annotations

import functools
import logging
import shlex
import sys
from pathlib import Path

from rein.errors import StoreError
from rein.files import open_file, read_file
from rein.handlers.output import ending
from rein.loop import Loop
from rein.loop.state import State
from rein.store.format.sealed import write_whole

logger = logging.getLogger("rein")


def run_log(loop: Loop, path: Path) -> None:
    """Append the messages of the logger `rein` to the file `path` while the loop runs.

    The file also has a line for the start and the end of each run, and the traceback of an error that ends a run. The
    logger decides which messages are written: by default warnings and errors, and with
    `logging.getLogger("rein").setLevel("INFO")` more. Messages still appear on the console: without a configured
    handler, warnings and errors. A file that cannot be written does not end the run.
    """
    file = _File(path)

    @loop.started.wire
    def begin(state: State) -> None:
        console = logging.lastResort  # Python does not use it if the logger has a handler
        if console is not None and not logger.hasHandlers():
            logger.addHandler(console)
            loop.cleanups.insert(0, functools.partial(logger.removeHandler, console))
        logger.addHandler(file)
        command = shlex.join(sys.argv)
        file.note(logging.INFO, f"{'resumed' if loop.resumed else 'started'} in epoch {state.epoch}: {command}")

    def end_last(loop: Loop, state: State) -> None:
        loop.cleanups.insert(0, file.end)  # after loggers have reported lost rows

    loop.started.observe(end_last)

    def end(loop: Loop, state: State) -> None:
        failure = sys.exc_info()[0] is not None and state.status == "failed"
        file.note(logging.ERROR if failure else logging.INFO, ending(state), traceback=failure)

    for final in (loop.completed, loop.halted, loop.failed):
        final.observe(end)


class _File(logging.Handler):
    """Appends each message to a file, which is opened for it, so that it can be moved or removed meanwhile."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))

    def note(self, level: int, message: str, *, traceback: bool = False) -> None:
        """Write a message that only the file receives."""
        if level >= self.level:
            found = sys.exc_info() if traceback else None
            self.handle(logging.LogRecord("rein", level, __file__, 0, message, None, found))

    def emit(self, record: logging.LogRecord) -> None:
        """Append a message. After an error, no further messages are written."""
        try:
            if self._path.exists() and self._path.lstat().st_nlink > 1:  # for example a copy made by `cp -al`
                write_whole(self._path, read_file(self._path))
            with open_file(self._path, "ab", buffering=0) as file:
                file.write(f"{self.format(record)}\n".encode(errors="backslashreplace"))
        except (OSError, StoreError) as error:
            self.setLevel(logging.CRITICAL + 1)
            logger.warning("%s cannot be written: %s; the run continues without it", self._path, error)

    def end(self) -> None:
        """Receive no more messages."""
        logger.removeHandler(self)
