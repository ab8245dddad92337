"""End a run in which nothing happens any more, and say what every thread was doing."""

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

HUNG_EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: try again


def watchdog(
    loop: Loop, *, seconds: float = 600.0, kill_after: float | None = None, file: TextIO | None = None
) -> None:
    """When no iteration ends for so long, write what every thread does to `file` (stderr) and interrupt the run.

    A run that comes back ends at the iteration's edge, is saved there by `checkpoint`, and can be resumed. One that
    does not is for whoever reads the stacks, or, with `kill_after`, is ended: where no iteration has ended so many
    seconds later either, the process kills its children (those of `multiprocessing`), flushes what was logged and exits
    at once with `HUNG_EXIT_CODE`, 75, for a scheduler to start it again. An evaluation is part of no iteration: give
    more seconds than the longest takes. Raises ValueError for no time at all, and for an infinite one.
    """
    limits = (seconds,) if kill_after is None else (seconds, kill_after)
    if not all(0 < limit <= threading.TIMEOUT_MAX for limit in limits):
        raise ValueError(f"watchdog({seconds=}, {kill_after=}): give finite numbers above 0")
    ended = threading.Event()

    def watch() -> None:
        state, seen = loop.state, -1
        while not ended.wait(seconds):
            if state.total_iterations == seen:
                stream = sys.stderr if file is None else file
                write_line(f"rein: no iteration has ended for {seconds:g} s; what the threads do:", stream)
                with contextlib.suppress(Exception):  # a stream that cannot be written is no reason not to interrupt
                    faulthandler.dump_traceback(stream)
                loop.interrupt(f"watchdog: no iteration ended for {seconds:g} s")
                if kill_after is not None and not ended.wait(kill_after) and state.total_iterations == seen:
                    _end_process(stream, f"rein: none for {kill_after:g} s more; the process ends with exit code")
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
    """Whatever hangs may hold locks of what is flushed here, so that gets a moment and no more."""

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
