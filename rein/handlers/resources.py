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
    """Interrupt the run when the disk under `path` has less than `disk` bytes left, or it uses more than `memory`.

    It ends at the edge with the reason, is saved there by `checkpoint`, and can be resumed when there is room. Memory
    is what the process has resident; None is no limit. Raises ValueError for numbers that are not above 0.
    """
    if not disk > 0 or (memory is not None and not memory > 0):
        raise ValueError(f"guard_resources({disk=}, {memory=}): give numbers of bytes above 0")
    folder = absolute(path)

    @loop.event(event)(**filters)
    def look(state: State) -> None:
        for reason in _shortages(folder, disk, memory):
            logger.warning("%s; the run is interrupted", reason)
            loop.interrupt(reason)


def _shortages(path: Path, disk: float, memory: float | None) -> Iterator[str]:
    while not path.exists():  # a run's folder that is not made yet
        path = path.parent
    free = shutil.disk_usage(path).free
    if free < disk:
        yield f"{path}: {free / 1e9:.2f} GB are free, and {disk / 1e9:.2f} GB shall be"
    if memory is not None and (used := resident_bytes()) > memory:
        yield f"the process uses {used / 1e9:.2f} GB of memory, and {memory / 1e9:.2f} GB are its limit"


def resident_bytes() -> int:
    """Memory of this process that is resident; where the system does not say, the most that it ever was."""
    try:
        fields = Path("/proc/self/statm").read_text().split()
    except OSError:
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")
