"""Write `run.json`, the description of a run, and `run.log`, its warnings, errors and the traceback of a failure."""

from __future__ import annotations

import functools
import logging
import shlex
import sys
from pathlib import Path
from typing import Any

from rein.errors import StoreError, text_of
from rein.files import open_file, read_file
from rein.handlers.output import ending, status_of
from rein.loop import Loop
from rein.loop.info import run_info
from rein.loop.state import INTERRUPT, State
from rein.store.format.sealed import write_whole

logger = logging.getLogger("rein")


def describe(loop: Loop, store: Any) -> None:
    """Call `store.write_run(info)` when the loop starts, and again when it ends.

    `info` describes the run, see `run_info`. At the end it also has `ended`: the status and its reason.
    """
    info: dict[str, Any] = {}

    @loop.started.wire
    def write_run(state: State) -> None:
        info.clear()  # in case the next line raises
        info.update(run_info(loop))
        store.write_run(info)

    def write_end(state: State) -> None:
        if not info:
            return
        try:
            store.write_run({**info, "ended": _end_of(state)})
        except (StoreError, OSError) as error:  # the results of the run are complete without it
            logger.warning("run.json has no status of the run: %s", error)

    for event in (loop.completed, loop.halted, loop.failed):
        event.wire(write_end, last=True)


def _end_of(state: State) -> dict[str, Any]:
    """Return the status and the reason of a run that ends."""
    error = sys.exception()
    if state.status == "failed":
        return {"status": "failed", "reason": None if error is None else text_of(error)[:1000]}
    if INTERRUPT in state.halts:
        return {"status": "interrupted", "reason": state.reason}
    status = "solved" if "solved" in state.memory else status_of(state)
    return {"status": status, "reason": state.reason if status == "halted" else None}


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
            exception = sys.exc_info() if traceback else None
            self.handle(logging.LogRecord("rein", level, __file__, 0, message, None, exception))

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
