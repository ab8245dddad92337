"""Data-parallel learning: each process has its environments, and all use the mean of their gradients.

Start the script with `torchrun --nproc-per-node 2 script.py`. A `Learner` that is built in a
process group averages gradients. No other setting is needed.

Shapes: P processes.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

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


def check_equal(options: Mapping[str, Any], device: torch.device) -> None:
    """Raise ValueError in all processes if they do not have equal options, with the names and the values.

    `options` must be JSON. Every process must call this at the same time.
    """
    said = _gather_text(_as_text(options), device)
    first, *others = (json.loads(text) for text in said)
    for number, other in enumerate(others, 1):
        if names := [name for name in sorted({*first, *other}) if first.get(name) != other.get(name)]:
            differ = "; ".join(
                f"{name} is {first.get(name)!r} in process 0 and {other.get(name)!r} in process {number}"
                for name in names
            )
            raise ValueError(
                f"process {rank()} of {processes()}: the options of the processes differ: {differ}. Give all processes "
                "the same options. A learning rate by env_steps needs the same num_envs in all; let it run by updates"
            )


@torch.no_grad()
def check_same(tensors: Sequence[Tensor], options: Mapping[str, Any]) -> None:
    """Raise ValueError in all processes if their tensors are not equal to the bit, or their options differ.

    One number is sent: a digest of all bits. Every process must call this at the same time.
    """
    device = tensors[0].device
    own = _digest(tensors, device).add_(zlib.crc32(_as_text(options)))
    digest_P = gather_from_processes(own)
    if bool((digest_P == digest_P[0]).all()):
        return
    check_equal(options, device)
    raise ValueError(
        f"process {rank()} of {processes()}: the networks or the optimizers of the processes differ. Build the agents "
        "with the same options and the same seed (and the environments with different seeds), resume all processes "
        "from checkpoints of the same epoch, and change learning rates during the run in the same way in all of them"
    )


def _as_text(options: Mapping[str, Any]) -> bytes:
    return json.dumps(options, sort_keys=True, default=lambda value: type(value).__qualname__).encode()


def _gather_text(text: bytes, device: torch.device) -> list[bytes]:
    """Return the text of every process, by rank."""
    sizes = gather_from_processes(torch.tensor(len(text), dtype=torch.int64, device=device)).tolist()
    padded = torch.tensor([*text, *[0] * (max(sizes) - len(text))], dtype=torch.uint8, device=device)
    rows = gather_from_processes(padded).tolist()
    return [bytes(row[:size]) for row, size in zip(rows, sizes, strict=True)]


_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element


def _digest(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return an int64 number that depends on every bit of the tensors and on their order."""
    digest = torch.zeros((), dtype=torch.int64, device=device)
    for tensor in tensors:
        words = tensor.to(device).contiguous().reshape(-1).view(_WORDS[tensor.element_size()]).long()
        places = torch.arange(1, 2 * len(words), 2, device=device)  # odd, so that every bit counts modulo 2^64
        digest.mul_(1_000_003).add_((words * places).sum() + len(words))
    return digest
