"""Interrupt a run before the disk or the memory is full."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rein.files import absolute
from rein.loop import Loop
from rein.loop.state import State

logger = logging.getLogger("rein")


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


def _shortages(path: Path, disk: float, memory: float | None) -> Iterator[str]:
    while not path.exists():  # the run folder may not exist yet
        path = path.parent
    free = shutil.disk_usage(path).free
    if free < disk:
        yield f"{path}: {free / 1e9:.2f} GB are free, less than the limit of {disk / 1e9:.2f} GB"
    if memory is not None and (used := resident_bytes()) > memory:
        yield f"the process uses {used / 1e9:.2f} GB of memory, more than the limit of {memory / 1e9:.2f} GB"


def resident_bytes() -> int:
    """Return the resident memory of this process, or its peak on systems that report only that."""
    try:
        fields = Path("/proc/self/statm").read_text().split()
    except OSError:
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")
