"""Interrupt a run that hangs, and write the stack of every thread."""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import multiprocessing
import os
import sys
import threading
from typing import TextIO

from rein.handlers.output import write_line
from rein.loop import Loop
from rein.loop.state import State

HUNG_EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h


def watchdog(
    loop: Loop, *, seconds: float = 600.0, kill_after: float | None = None, file: TextIO | None = None
) -> None:
    """Interrupt the run if no iteration ends within `seconds`, and write the stacks of all threads to `file`.

    A run that recovers ends at the next edge, is saved there by `checkpoint`, and can be resumed. Set `seconds` above
    the duration of the longest evaluation, because an evaluation is not part of an iteration.

    Args:
        loop: Loop to watch.
        seconds: Maximum time between the ends of two iterations.
        kill_after: If no iteration has ended this many seconds later either, end the process with the exit code
            `HUNG_EXIT_CODE` (75), so that a scheduler can restart it. Its `multiprocessing` children are killed and its
            logs are flushed before. None never exits.
        file: Open text file. Default: standard error.

    Raises:
        ValueError: If a time is not above 0 or not finite.
    """
    limits = (seconds,) if kill_after is None else (seconds, kill_after)
    if not all(0 < limit <= threading.TIMEOUT_MAX for limit in limits):
        raise ValueError(f"watchdog({seconds=}, {kill_after=}): expected finite numbers above 0")
    ended = threading.Event()

    def watch() -> None:
        state, seen = loop.state, -1
        while not ended.wait(seconds):
            if state.total_iterations == seen:
                stream = sys.stderr if file is None else file
                write_line(f"rein: no iteration has ended for {seconds:g} s; stacks of all threads:", stream)
                with contextlib.suppress(Exception):  # interrupt even if the stream cannot be written
                    faulthandler.dump_traceback(stream)
                loop.interrupt(f"watchdog: no iteration ended for {seconds:g} s")
                if kill_after is not None and not ended.wait(kill_after) and state.total_iterations == seen:
                    _end_process(stream, f"rein: no iteration has ended for {kill_after:g} s more; exiting with code")
                return
            seen = state.total_iterations

    @loop.started
    def begin(state: State) -> None:
        ended.clear()
        thread = threading.Thread(target=watch, name="rein-watchdog", daemon=True)
        thread.start()

        def end() -> None:
            ended.set()
            thread.join()

        loop.cleanups.append(end)


def _end_process(stream: TextIO, text: str) -> None:
    """Kill the children and exit. Flushing has a time limit, because the hanging thread may hold locks."""

    def flush() -> None:
        write_line(f"{text} {HUNG_EXIT_CODE}", stream)
        logging.shutdown()
        sys.stdout.flush()

    for child in multiprocessing.active_children():
        child.kill()
    flushing = threading.Thread(target=flush, daemon=True)
    flushing.start()
    flushing.join(5.0)
    os._exit(HUNG_EXIT_CODE)
