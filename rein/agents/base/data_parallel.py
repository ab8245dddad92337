"""Data-parallel learning: each process steps its own environments, and gradients are averaged over all processes.

Start the script with `torchrun --nproc-per-node 2 script.py`. A `Learner` that is built in a process group averages
gradients. No other setting is needed.

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

from rein.agents.base.optimizers import describe_optimizer
from rein.ops.parallel import gather_from_processes, processes, rank, sum_over_processes
from rein.ops.trees import leaves

CHECK_EVERY = 100  # steps from one comparison of the processes to the next


class Group(NamedTuple):
    """The processes that learn together."""

    rank: int  # of this process, counted from 0
    processes: int


@contextlib.contextmanager
def process_group(timeout: float = 600.0) -> Iterator[Group]:
    """Context manager: join the processes that `torchrun` started. Without `torchrun`, the group has one process.

    torch selects the backend: gloo for tensors on the CPU, NCCL on GPUs. A process raises RuntimeError if it waits for
    another process for more than `timeout` seconds, or as soon as the other process dies.
    """
    if not timeout > 0.0:
        raise ValueError(f"process_group(timeout={timeout}): the timeout must be a positive number of seconds")
    if "RANK" not in os.environ:
        yield Group(0, 1)
        return
    dist.init_process_group(timeout=datetime.timedelta(seconds=timeout))
    try:
        yield Group(rank(), processes())
    finally:
        dist.destroy_process_group()


def mean_of_processes(number: float) -> float:
    """Return the mean of `number` over all processes, for example to decide together when to stop.

    Every process must call this at the same time, for example at the end of an epoch.
    """
    if processes() == 1:
        return number
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    return float(sum_over_processes(torch.tensor(number, dtype=torch.float64, device=device))) / processes()


@torch.no_grad()
def average(
    gradients: Sequence[Tensor | None], metrics: Mapping[str, Tensor], rows: int | Tensor
) -> tuple[list[Tensor | None], dict[str, Tensor]]:
    """Average gradients and metrics over all processes, weighted by the number of `rows` n_p of each process.

    The mean is::

        g = (sum over p of n_p g_p) / (sum over p of n_p)

    The result is bit-identical in all processes. Up to rounding, it equals the result of one process with all rows. A
    gradient that is None must be None in all processes. Metrics with one value per row are returned unchanged.
    """
    scalars = [name for name, value in metrics.items() if not value.ndim]
    parts = [*(gradient for gradient in gradients if gradient is not None), *(metrics[name] for name in scalars)]
    if not parts:  # all parameters are frozen
        return [*gradients], {**metrics}
    rows = torch.as_tensor(rows, dtype=torch.float32, device=parts[0].device)
    numbers = torch.cat([part.reshape(-1) for part in parts]).mul_(rows)
    summed = sum_over_processes(torch.cat((numbers, rows.reshape(1))))  # a single message
    means = (summed[:-1] / summed[-1].clamp(min=1.0)).split([part.numel() for part in parts])
    shaped = iter([mean.view_as(part) for mean, part in zip(means, parts, strict=True)])
    averaged = [None if gradient is None else next(shaped) for gradient in gradients]
    return averaged, {**metrics, **dict(zip(scalars, shaped, strict=True))}


class LearnerGroup:
    """The learners of all processes at the same place of their agents, seen from that of this process."""

    def __init__(self, learner: Any) -> None:
        self.learner = learner
        self._until_check = 0  # steps until the next comparison of the processes

    def average(
        self, gradients: list[Tensor | None], metrics: dict[str, Tensor], batch: Any
    ) -> tuple[list[Tensor | None], dict[str, Tensor]]:
        """Average over processes. Raises ValueError if decisions differ, or, every 100 steps, networks or options."""
        learner = self.learner
        self._check_size()
        if learner.decisions is not None:
            check_equal(learner.decisions, learner.device)
        if not self._until_check:
            state = (leaf for _, leaf in leaves(learner.state_dict()) if isinstance(leaf, Tensor))
            check_same([*learner.parameters, *state], self._shared_options())
            self._until_check = CHECK_EVERY
        self._until_check -= 1
        return average(gradients, metrics, batch.shape.numel() if batch.valid is None else batch.valid.sum())

    def compare(self, options: Mapping[str, Any]) -> None:
        """Raise ValueError if the options of an agent differ between the processes."""
        self._check_size()
        check_equal(options, self.learner.device)

    def _check_size(self) -> None:
        if processes() != self.learner.processes:
            raise RuntimeError(
                f"the agent was built in a group of {self.learner.processes} processes and learns in a group of "
                f"{processes()}: build and train it within the same `with process_group():`"
            )

    def _shared_options(self) -> dict[str, Any]:
        """Return the settings of the optimizer that must be equal in all processes, as JSON."""
        learner = self.learner
        return {
            "optimizer": describe_optimizer(learner.optimizer),
            "learning_rate": [float(group["lr"]) for group in learner.optimizer.param_groups if "lr" in group],
            "max_grad_norm": learner.max_grad_norm,
            "frozen parameters": [i for i, p in enumerate(learner.parameters) if not p.requires_grad],
        }


def check_equal(options: Mapping[str, Any], device: torch.device) -> None:
    """Raise ValueError in all processes if their options differ. The message lists the options that differ.

    `options` must be JSON. Every process must call this at the same time.
    """
    first, *others = (json.loads(text) for text in _gather_text(_as_text(options), device))
    for number, other in enumerate(others, 1):
        if names := [name for name in sorted({*first, *other}) if first.get(name) != other.get(name)]:
            differ = "; ".join(
                f"{name} is {first.get(name)!r} in process 0 and {other.get(name)!r} in process {number}"
                for name in names
            )
            raise ValueError(
                f"process {rank()} of {processes()}: the options of the processes differ: {differ}. Give all processes "
                "the same options. A schedule of env_steps requires the same num_envs in all processes; use updates= "
                "instead"
            )


@torch.no_grad()
def check_same(tensors: Sequence[Tensor], options: Mapping[str, Any]) -> None:
    """Raise ValueError in all processes if their tensors are not bit-identical or their options differ.

    Each process sends one number, a digest of all bits. Every process must call this at the same time.
    """
    device = tensors[0].device
    digest = _digest(tensors, device).add_(zlib.crc32(_as_text(options)))
    digest_P = gather_from_processes(digest)
    if bool((digest_P == digest_P[0]).all()):
        return
    check_equal(options, device)
    raise ValueError(
        f"process {rank()} of {processes()}: the networks or the optimizers of the processes differ. Build the agents "
        "with the same options and the same seed (and the environments with different seeds), resume all processes "
        "from checkpoints of the same epoch, and change learning rates in the same way in all processes"
    )


def _as_text(options: Mapping[str, Any]) -> bytes:
    return json.dumps(options, sort_keys=True, default=lambda value: type(value).__qualname__).encode()


def _gather_text(text: bytes, device: torch.device) -> list[bytes]:
    """Return the texts of all processes, in the order of their ranks."""
    sizes = gather_from_processes(torch.tensor(len(text), dtype=torch.int64, device=device)).tolist()
    padded = torch.tensor([*text, *[0] * (max(sizes) - len(text))], dtype=torch.uint8, device=device)
    rows = gather_from_processes(padded).tolist()
    return [bytes(row[:size]) for row, size in zip(rows, sizes, strict=True)]


_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by element size in bytes


def _digest(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return an int64 number that depends on every bit of the tensors and on their order."""
    digest = torch.zeros((), dtype=torch.int64, device=device)
    for tensor in tensors:
        words = tensor.to(device).contiguous().reshape(-1).view(_WORDS[tensor.element_size()]).long()
        places = torch.arange(1, 2 * len(words), 2, device=device)  # odd factors keep every bit modulo 2^64
        digest.mul_(1_000_003).add_((words * places).sum() + len(words))
    return digest
