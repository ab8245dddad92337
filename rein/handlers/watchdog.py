"""Watch the process of a run: interrupt a run that hangs or lacks disk or memory, and report the use of resources."""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import math
import multiprocessing
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import torch

from rein.files import absolute
from rein.handlers.output import rate, write_line
from rein.loop import Loop
from rein.loop.state import State

logger = logging.getLogger("rein")

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


def guard_resources(
    loop: Loop,
    path: str | Path = ".",
    *,
    disk: float = 1e9,
    memory: float | None = None,
    event: str = "epoch_ended",
    **filters: Any,
) -> None:
    """Interrupt the run if the disk of `path` has less than `disk` bytes left, or the process uses more than `memory`.

    The run ends at the next edge, is saved there by `checkpoint`, and can be resumed. `memory` limits the resident
    memory in bytes; None sets no limit. Raises ValueError if a limit is not above 0.
    """
    if not disk > 0 or (memory is not None and not memory > 0):
        raise ValueError(f"guard_resources({disk=}, {memory=}): expected numbers of bytes above 0")
    folder = absolute(path)

    @loop.event(event)(**filters)
    def look(state: State) -> None:
        for reason in _shortages(folder, disk, memory):
            logger.warning("%s; the run is interrupted", reason)
            loop.interrupt(reason)


def resource_usage(loop: Loop, **filters: Any) -> None:
    """Report the use of processor and memory at the end of epochs.

    The metrics are `cpu_cores`, the mean number of processor cores in use by this process since the last report,
    `memory_gb`, its resident memory, and with CUDA `gpu_memory_gb`, the memory of its tensors on the current device.
    Child processes are not included. `filters` select the epochs, such as `every=10`.
    """
    last = [0.0, 0.0]  # wall-clock and processor seconds
    loop.metrics.declare("cpu_cores", "memory_gb", "gpu_memory_gb")

    @loop.started
    def begin(state: State) -> None:
        last[:] = time.perf_counter(), time.process_time()

    @loop.epoch_completed(**filters)
    @loop.epoch_halted(**filters)
    def report(state: State) -> None:
        now = time.perf_counter(), time.process_time()
        state.metrics["cpu_cores"] = rate(now[1] - last[1], now[0] - last[0])
        state.metrics["memory_gb"] = resident_bytes() / 1e9
        if torch.cuda.is_initialized():
            state.metrics["gpu_memory_gb"] = torch.cuda.memory_allocated() / 1e9
        last[:] = now


def _shortages(path: Path, disk: float, memory: float | None) -> Iterator[str]:
    while not path.exists():  # the run folder may not exist yet
        path = path.parent
    free = shutil.disk_usage(path).free
    if free < disk:
        yield f"{path}: {free / 1e9:.2f} GB are free, less than the limit of {disk / 1e9:.2f} GB"
    if memory is not None and (used := resident_bytes()) > memory:
        yield f"the process uses {used / 1e9:.2f} GB of memory, more than the limit of {memory / 1e9:.2f} GB"


def resident_bytes() -> float:
    """Return the resident memory of this process, its peak on macOS, or NaN on Windows."""
    try:
        fields = Path("/proc/self/statm").read_text().split()
    except OSError:
        try:
            import resource
        except ImportError:
            return math.nan
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")
