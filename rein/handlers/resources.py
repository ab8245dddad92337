"""Report the use of processor and memory, and interrupt a run before the disk or the memory is full."""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from rein.files import absolute
from rein.handlers.output import rate
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


def resident_bytes() -> int:
    """Return the resident memory of this process, or its peak on systems that report only that."""
    try:
        fields = Path("/proc/self/statm").read_text().split()
    except OSError:
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")
