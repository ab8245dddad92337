"""Memory for rows, or a file in its place, refused at once where there is not enough."""

from __future__ import annotations

import mmap
import os
import tempfile

import torch
from torch import Tensor


def allocate(rows: int, row_bytes: int, storage: str, device: torch.device) -> Tensor:
    """(rows, row_bytes) of zeros as bytes, in memory or, for "memmap", in an unnamed file under `TMPDIR`.

    Raises MemoryError where more is asked for than there is, and says how much.
    """
    size = rows * row_bytes
    if storage == "memmap":
        return _mapped(size).view(rows, row_bytes)
    free = free_bytes(device)
    if free is not None and size > free:
        raise MemoryError(
            f"a replay of {rows:,} transitions needs {size:,} bytes ({row_bytes} each), and {free:,} are free on "
            f'{device}; give a smaller capacity, or storage="memmap" to keep it on disk'
        )
    return torch.zeros(rows, row_bytes, dtype=torch.uint8, device=device)


def _mapped(size: int) -> Tensor:
    with tempfile.TemporaryFile(prefix="rein-replay-") as file:
        free = os.statvfs(file.fileno())
        if size > free.f_bavail * free.f_frsize:
            left = free.f_bavail * free.f_frsize
            raise MemoryError(f"a replay of {size:,} bytes does not fit in {tempfile.gettempdir()}: {left:,} are free")
        if hasattr(os, "posix_fallocate"):  # a disk that is full only later on would be a SIGBUS
            os.posix_fallocate(file.fileno(), 0, size)
        else:
            os.truncate(file.fileno(), size)
        return torch.frombuffer(mmap.mmap(file.fileno(), size), dtype=torch.uint8)  # the map outlives the descriptor


def free_bytes(device: torch.device) -> int | None:
    """What may still be allocated there; None where nobody knows."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type != "cpu":
        return None
    try:
        with open("/proc/meminfo") as file:
            found = {line.split(":")[0]: int(line.split()[1]) << 10 for line in file if line.endswith("kB\n")}
    except OSError:
        return None
    free = found.get("MemAvailable")
    limit = _group_limit()
    return free if limit is None else limit if free is None else min(free, limit)


def _group_limit() -> int | None:
    """What is left of a container's limit (cgroup v2), files that are merely cached left out; None without one."""
    group = "/sys/fs/cgroup/memory"
    try:
        with open(f"{group}.max") as limit, open(f"{group}.current") as used, open(f"{group}.stat") as stat:
            cached = dict(line.split() for line in stat).get("inactive_file", 0)
            return int(limit.read()) - int(used.read()) + int(cached)
    except (OSError, ValueError):  # no such group, or "max"
        return None
