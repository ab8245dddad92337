"""Several processes learn as one: each in environments of its own, all by the mean of their gradients.

`torch.distributed` carries it, so `torchrun --nproc-per-node 2 script.py` is how it is started. A `Learner` that is
built in a process group averages; nothing else has to be said.

Shapes: P processes.
"""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from rein.ops.parallel import gather_from_processes, processes, rank, sum_over_processes


class Group(NamedTuple):
    """The processes that learn together."""

    rank: int  # of this one, from 0
    processes: int


@contextlib.contextmanager
def process_group(timeout: float = 600.0) -> Iterator[Group]:
    """Join the processes that `torchrun` has started, until the end of the `with`; where it has not, there is but one.

    The backend is torch's choice: gloo for tensors on the host, NCCL on GPUs. A process that waits for another, in an
    update or here, gives up with a RuntimeError after `timeout` seconds; at once, where the other has died.
    """
    if not timeout > 0.0:
        raise ValueError(f"process_group(timeout={timeout}): give a positive number of seconds")
    if "RANK" not in os.environ:
        yield Group(0, 1)
        return
    dist.init_process_group(timeout=datetime.timedelta(seconds=timeout))
    try:
        yield Group(rank(), processes())
    finally:
        dist.destroy_process_group()


def mean_of_processes(number: float) -> float:
    """The mean of what every process gave: for rules that decide when all of them end.

    Every process has to ask at the same time, at the end of an epoch, say.
    """
    if processes() == 1:
        return number
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    return float(sum_over_processes(torch.tensor(number, dtype=torch.float64, device=device))) / processes()


@torch.no_grad()
def average(
    gradients: Sequence[Tensor | None], metrics: Mapping[str, Tensor], rows: int | Tensor
) -> tuple[list[Tensor | None], dict[str, Tensor]]:
    """The gradients and metrics of all processes, each weighed by how many `rows` they are the mean of.

        g = (sum over p of n_p g_p) / (sum over p of n_p)

    They are the same bits in all processes, and but for rounding those of one process with all the rows. A gradient
    that is None must be so in all of them. Metrics that are no single number, but one for each row, stay as they are.
    """
    numbered = [name for name, value in metrics.items() if not value.ndim]
    own = [*(gradient for gradient in gradients if gradient is not None), *(metrics[name] for name in numbered)]
    if not own:  # all parameters are frozen, in all of them
        return [*gradients], {**metrics}
    rows = torch.as_tensor(rows, dtype=torch.float32, device=own[0].device)
    numbers = torch.cat([part.reshape(-1) for part in own]).mul_(rows)
    summed = sum_over_processes(torch.cat((numbers, rows.reshape(1))))  # one message for all
    means = (summed[:-1] / summed[-1].clamp(min=1.0)).split([part.numel() for part in own])
    shaped = iter([mean.view_as(part) for mean, part in zip(means, own, strict=True)])
    averaged = [None if gradient is None else next(shaped) for gradient in gradients]
    return averaged, {**metrics, **dict(zip(numbered, shaped, strict=True))}


@torch.no_grad()
def check_same(parameters: Sequence[Tensor]) -> None:
    """ValueError, in all processes, where one of them has other parameters than the first."""
    mine = torch.cat([parameter.reshape(-1) for parameter in parameters])
    sizes_P = gather_from_processes(torch.tensor(mine.numel(), device=mine.device))
    same = bool((sizes_P == mine.numel()).all())
    if same:
        first = sum_over_processes(mine.clone() if rank() == 0 else torch.zeros_like(mine))
        same = float(sum_over_processes((first != mine).any().float())) == 0.0
    if not same:
        raise ValueError(
            f"process {rank()} of {processes()}: the networks of the processes differ. Give their agents the same "
            "options and the same seed (their environments other ones), or checkpoints that were taken at the same time"
        )
