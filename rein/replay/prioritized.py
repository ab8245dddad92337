"""Prioritized experience replay, and the sum tree from which it samples with few operations.

A binary tree of a million numbers has twenty levels, with at least three operations each. Here `WIDTH` numbers form a
block. The top level has at most `TOP` numbers, whose running sums are computed for each draw. A million numbers need
only two levels above them.

Shapes: B rows, W numbers in a block, K numbers in the top level.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rein.accelerators import find
from rein.ops.trees import checked_device
from rein.replay.replay import Replay
from rein.replay.storage import Packing

logger = logging.getLogger(__name__)

_INFINITY = float("inf")


# Number n is in block n >> SHIFT. numba compiles this value into its cached code until compiled_tree.py changes.
SHIFT = 4
WIDTH = 1 << SHIFT  # W; with a million rows, 8 is slower in torch, 32 in numba, and 2 in both
TOP = 4096


def total(x: Tensor) -> Tensor:
    """Return the sum over the last dimension, added in order, so that torch and numba agree to the bit."""
    return x.cumsum(-1)[..., -1]


def padded(count: int) -> int:
    """Return the length of a level for `count` numbers: whole blocks, except for the top level."""
    return count if count <= TOP else -(-count // WIDTH) * WIDTH


def levels_of(leaf: Tensor) -> list[Tensor]:
    """Return the levels of a tree, lowest first. The lowest is `leaf`, of a `padded` length; padding is 0."""
    levels = [leaf]
    while len(levels[-1]) > TOP:
        block = total(levels[-1].view(-1, WIDTH))
        above = block.new_zeros(padded(len(block)))
        above[: len(block)] = block
        levels.append(above)
    return levels


def refresh_(levels: Sequence[Tensor], block_B: Tensor) -> None:
    """Compute the numbers above these blocks of the lowest level again, in place. Blocks may be repeated.

    Each number is computed from its whole block, not by adding a difference, so rounding errors do not accumulate.
    """
    for level, above in itertools.pairwise(levels):
        above.index_copy_(0, block_B, total(level.view(-1, WIDTH).index_select(0, block_B)))
        block_B = block_B >> SHIFT


def draw(levels: Sequence[Tensor], uniform_B: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Sample rows (B,) int64 of the lowest level of a sum tree in proportion to its numbers; also return the total ().

    `uniform_B` has one (B,) float64 tensor in [0, 1) per level, top level first. In each block, the first number is
    selected whose running sum exceeds that fraction of the block's sum. A number that is 0 is never selected, because a
    fraction of a sum below 1 stays below the sum after rounding.

    Numbers must not be negative and the total must not be 0, otherwise rows are out of range.
    """
    running_K = levels[-1].cumsum(0)
    whole = running_K[-1]
    row_B = torch.searchsorted(running_K, uniform_B[0] * whole, right=True)
    for level, part_B in zip(reversed(levels[:-1]), uniform_B[1:], strict=True):
        running_BW = level.view(-1, WIDTH).index_select(0, row_B).cumsum(-1)
        mass_B1 = (part_B * running_BW[:, -1]).unsqueeze(-1)
        row_B = torch.searchsorted(running_BW, mass_B1, right=True).view(-1).add_(row_B, alpha=WIDTH)
    return row_B, whole


class Priorities:
    """Priorities of `capacity` rows, and sampling in proportion to them::

        p_i = (|delta_i| + epsilon)^alpha      P(i) = p_i / sum of all p      w_i = (N P(i))^-beta / max w

    A row can be sampled after it was appended and until it is removed. A new row has the largest priority of any row so
    far, initially 1, so that every row is soon learned once. `alpha` = 0 samples uniformly. The largest weight of a
    batch is 1. N cancels out.

    Source: Schaul et al. 2016 ("Prioritized experience replay"), 3.3, 3.4 and algorithm 1. Rows are sampled
    independently, not one from each of B ranges as in its B.2.1, so a batch can be split.

    numba compiles the operations on the CPU if it is installed, with the same results to the bit.

    Raises ValueError for numbers out of their range.
    """

    def __init__(
        self,
        capacity: int,
        *,
        alpha: float = 0.6,
        epsilon: float = 1e-6,
        device: torch.device | str = "cpu",
    ) -> None:
        if capacity < 1:
            raise ValueError(f"Priorities(capacity={capacity}): give 1 or more")
        if not 0.0 <= alpha <= 1.0:
            raise ValueError(f"Priorities(alpha={alpha}): give a number from 0 (uniform sampling) to 1")
        if not 0.0 < epsilon < _INFINITY:
            raise ValueError(f"Priorities(epsilon={epsilon}): give a number above 0, so that every row can be sampled")
        self.capacity = capacity
        self.alpha = alpha
        self.epsilon = epsilon
        self.device = checked_device(device)
        self._priority = torch.zeros(padded(capacity), dtype=torch.float64, device=self.device)
        self._maximum = torch.ones((), dtype=torch.float64, device=self.device)
        self._rebuild()

    @property
    def _compiled(self) -> Any:
        """The numba functions for the CPU; None to use torch. A copy may be loaded without numba."""
        return find("sum_tree") if self.device.type == "cpu" else None

    @property
    def config(self) -> dict[str, Any]:
        """The arguments of the constructor, as JSON."""
        return {
            "capacity": self.capacity,
            "alpha": self.alpha,
            "epsilon": self.epsilon,
            "device": str(self.device),
        }

    def __getitem__(self, index_B: Tensor) -> Tensor:
        """Return the priorities (B,) float64 of rows; 0 for rows that cannot be sampled."""
        return self._priority.index_select(0, index_B)

    def append(self, index_B: Tensor, valid_B: Tensor | None = None) -> None:
        """Give new rows the largest priority so far, and rows that are not valid none."""
        priority_B = self._maximum.expand(len(index_B))
        self._write(index_B, priority_B if valid_B is None else priority_B * valid_B)

    def remove(self, index_B: Tensor) -> None:
        """Exclude rows from sampling until they are appended again."""
        self._write(index_B, self._maximum.new_zeros(len(index_B)))

    def sample(self, batch_size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Sample rows with replacement; returns rows (B,) int64 and their probabilities (B,) float64.

        Raises ValueError if no row can be sampled. On other devices than the CPU, the device raises an error later,
        since checking would wait for the device.
        """
        self._refresh()
        shape = (len(self._sums), batch_size)
        uniform_LB = torch.rand(shape, generator=generator, dtype=torch.float64, device=self.device)
        empty = "Priorities.sample: no row can be sampled; append one first"
        if (compiled := self._compiled) is not None:
            index_B = torch.empty(batch_size, dtype=torch.int64, device=self.device)
            probability_B = torch.empty(batch_size, dtype=torch.float64, device=self.device)
            results = index_B.numpy(), probability_B.numpy()
            if not compiled.draw(_arrays(self._sums), uniform_LB.numpy(), *results):
                raise ValueError(empty)
            return index_B, probability_B
        try:
            index_B, whole = draw(self._sums, uniform_LB.unbind())
            priority_B = self._priority.index_select(0, index_B)
        except IndexError as error:  # on the CPU; a check beforehand would cost as much as a level
            raise ValueError(empty) from error
        return index_B, priority_B.div_(whole)

    def weights(self, probability_B: Tensor, beta: float) -> Tensor:
        """Return importance weights (B,) float32 in [0, 1] of rows sampled with these probabilities.

        `beta` = 1 corrects for the non-uniform sampling completely, 0 not at all; the paper anneals it to 1. Call
        before `update`, which changes the probabilities.
        """
        if not len(probability_B):
            return torch.zeros(0, dtype=torch.float32, device=probability_B.device)
        host_B = _on_host(probability_B)
        with np.errstate(divide="ignore", invalid="ignore"):  # division by 0 gives infinity, as in torch
            weight_B = (host_B.min() / host_B) ** float(beta)
        return weight_B.float() if isinstance(weight_B, Tensor) else torch.from_numpy(weight_B.astype(np.float32))

    def update(self, index_B: Tensor, td_error_B: Tensor) -> None:
        """Set the priorities of rows from their TD errors; of duplicate rows the larger error counts.

        Removed rows stay removed. An error that is not finite leaves the priority unchanged. Raises ValueError if rows
        and errors have different shapes, and IndexError for rows out of range.
        """
        if index_B.shape != td_error_B.shape:
            shapes = f"rows {tuple(index_B.shape)}, and errors {tuple(td_error_B.shape)}"
            raise ValueError(f"Priorities.update: {shapes}; give one error for each row")
        if not len(index_B):
            return
        new_B = (abs(_on_host(td_error_B.detach().double())) + self.epsilon) ** self.alpha
        if (compiled := self._compiled) is not None:
            compiled.update(_arrays(self._sums), index_B.contiguous().numpy(), new_B, self._maximum.numpy())
            return
        priority_B = new_B if isinstance(new_B, Tensor) else torch.from_numpy(new_B)
        before_B = self._priority.index_select(0, index_B)
        bound_B = before_B * _INFINITY  # NaN for priority 0, so that the comparison is False
        priority_B = torch.where(priority_B < bound_B, priority_B, before_B)
        torch.maximum(self._maximum, priority_B.amax(), out=self._maximum)
        self._priority.scatter_reduce_(0, index_B, priority_B, "amax", include_self=False)  # independent of the order
        self._outdate(index_B)

    def state_dict(self) -> dict[str, Any]:
        """Return everything that future samples depend on."""
        stale = torch.cat(self._stale) if self._stale else torch.zeros(0, dtype=torch.int64, device=self.device)
        return {"priority": self._priority, "sums": self._sums[1:], "stale": stale, "maximum": self._maximum}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned. Raises ValueError if it has another capacity or is damaged."""
        priority, sums, stale, maximum = (state[name] for name in ("priority", "sums", "stale", "maximum"))
        received, expected = ([tuple(x.shape) for x in levels] for levels in ([priority, *sums], self._sums))
        if received != expected:
            raise ValueError(f"priority and sums of {self.capacity} rows have the shapes {expected}, not {received}")
        if len(stale) and not 0 <= int(stale.amin()) <= int(stale.amax()) < len(priority) >> SHIFT:
            raise ValueError(f"stale has blocks from {int(stale.amin())} to {int(stale.amax())}, which is out of range")
        self._priority.copy_(priority)
        self._maximum.copy_(maximum)
        self._rebuild()
        for above, saved in zip(self._sums[1:], sums, strict=True):
            above.copy_(saved)  # the last bit may depend on the number of blocks that were summed together
        if len(stale):
            self._stale = [stale.to(self.device, copy=True)]
            self._stale_rows = len(stale)

    def _write(self, index_B: Tensor, priority_B: Tensor) -> None:
        self._priority.index_copy_(0, index_B, priority_B)
        self._outdate(index_B)

    def _outdate(self, index_B: Tensor) -> None:
        """Mark the sums above rows as stale; the next sample computes them together."""
        if len(self._sums) > 1:
            self._stale.append(index_B >> SHIFT)
            self._stale_rows += len(index_B)
            if self._stale_rows >= len(self._priority) >> SHIFT:
                self._rebuild()  # not more expensive than refreshing the stale blocks

    def _refresh(self) -> None:
        if self._stale:
            block_B = self._stale[0] if len(self._stale) == 1 else torch.cat(self._stale)
            if (compiled := self._compiled) is not None:
                compiled.refresh(_arrays(self._sums), block_B.numpy())
            else:
                refresh_(self._sums, block_B)
            self._stale = []
            self._stale_rows = 0

    def _rebuild(self) -> None:
        self._sums = levels_of(self._priority)
        self._stale: list[Tensor] = []  # blocks with changed priorities, whose sums are not computed yet
        self._stale_rows = 0


class PrioritizedReplay(Replay):
    """Replay buffer with proportional prioritization; `Priorities` has the equations.

    Multiply the losses of a sample by `weights(sample.probability, beta)`, then call `update` with its errors.
    """

    def __init__(
        self,
        capacity: int,
        *,
        alpha: float = 0.6,
        storage: str = "memory",
        device: torch.device | str = "cpu",
    ) -> None:
        """`alpha` is that of `Priorities`."""
        super().__init__(capacity, storage=storage, device=device)
        self.prioritize(alpha)

    def prioritize(self, alpha: float) -> None:
        """Set the exponent of priorities before the first row."""
        self._options = {"alpha": alpha, "device": self.device}
        self.priorities = Priorities(1, **self._options)  # replaced when the number of rows is known

    def _take(self, packing: Packing, slots: int) -> None:
        super()._take(packing, slots)
        self.priorities = Priorities(slots * self.num_envs, **self._options)

    def written(self, index_R: Tensor, valid_R: Tensor) -> None:
        """Give new rows the largest priority so far, and rows that are not valid none."""
        self.priorities.append(index_R, valid_R)

    def _draw(self, batch_size: int, generator: torch.Generator, replacement: bool) -> tuple[Tensor, Tensor]:
        """Sample in proportion to priorities. Raises ValueError without `replacement`."""
        if not replacement:
            raise ValueError("sample(replacement=False): a prioritized replay samples with replacement only")
        return self.priorities.sample(batch_size, generator)

    def weights(self, probability_B: Tensor, beta: float) -> Tensor:
        """Return the importance weights (B,) of the rows of a sample; see `Priorities.weights`."""
        return self.priorities.weights(probability_B, beta)

    def update(self, index_B: Tensor, td_error_B: Tensor) -> None:
        """Set the priorities of rows from their TD errors."""
        self.priorities.update(index_B, td_error_B)

    def state_dict(self) -> dict[str, Any]:
        """Return the rows and their priorities."""
        return {**super().state_dict(), "priorities": self.priorities.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned. Raises ValueError if it has another capacity."""
        super().load_state_dict(state)
        if state["filled"]:
            self.priorities.load_state_dict(state["priorities"])
        else:
            self.priorities = Priorities(max(1, self.slots * self.num_envs), **self._options)


def _on_host(x_B: Tensor) -> Any:
    """Return a CPU tensor as an array of the same memory: numpy takes half of torch's time for few numbers."""
    return x_B.numpy() if x_B.device.type == "cpu" else x_B


def _arrays(levels: list[Tensor]) -> tuple[Any, ...]:
    """Return arrays of the same memory, for numba."""
    return tuple([level.numpy() for level in levels])
