"""Sums over the processes of `torch.distributed`'s default group.

All processes have to call the same functions in the same order, with tensors of the same shapes.

Shapes: P processes.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def processes() -> int:
    """P; 1 where no group has been initialized."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Which of them this one is, from 0; 0 where no group has been initialized."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


@torch.no_grad()
def sum_over_processes(x: Tensor) -> Tensor:
    """`x`, which becomes the sum of what every process gave, the same bits in all of them.

    Raises RuntimeError where another process died, or did not come before the group's timeout.
    """
    try:
        dist.all_reduce(x)
    except RuntimeError as error:
        error.add_note(
            f"process {rank()} of {processes()} waited for the others in a sum over all of them. One of them died "
            "(what it says comes first), was not there before the timeout of the process group, or takes other steps "
            "than this one: all must learn equally often, and end together"
        )
        raise
    return x


def gather_from_processes(x: Tensor) -> Tensor:
    """(P, ...) what every process gave, in the order of their ranks."""
    gathered = x.new_zeros((processes(), *x.shape))
    gathered[rank()] = x
    return sum_over_processes(gathered)
