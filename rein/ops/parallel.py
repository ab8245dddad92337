"""Sums over the processes of the default group of `torch.distributed`.

All processes must call the same functions in the same order, with tensors of the same shapes.

Shapes: P processes.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def processes() -> int:
    """Return the number of processes P; 1 without an initialized group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Return the rank of this process; 0 without an initialized group."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


@torch.no_grad()
def sum_over_processes(x: Tensor) -> Tensor:
    """Replace `x` by its sum over all processes, bitwise equal in all of them, and return it.

    Raises RuntimeError if another process died or did not call this before the timeout of the group.
    """
    try:
        dist.all_reduce(x)
    except RuntimeError as error:
        error.add_note(
            f"process {rank()} of {processes()} waited for the others in a sum over all processes. Another process "
            "died (see its error above), was slower than the timeout of the process group, or made a different number "
            "of updates. All processes must make the same updates and end together"
        )
        raise
    return x


def gather_from_processes(x: Tensor) -> Tensor:
    """Return the tensors of all processes, ordered by rank; (P, ...)."""
    gathered = x.new_zeros((processes(), *x.shape))
    gathered[rank()] = x
    return sum_over_processes(gathered)
