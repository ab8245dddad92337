"""Which rows of a buffer to learn from again: those more often that had more to teach.

Shapes: B rows.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rein.ops import backend
from rein.ops.devices import checked_device
from rein.replay.sum_tree import SHIFT, draw, least_positive, levels_of, padded, refresh_, total

logger = logging.getLogger(__name__)

_INFINITY = float("inf")


class Priorities:
    """The priorities of `capacity` rows, known by their index, and draws in proportion to them.

        p_i = (|delta_i| + epsilon)^alpha      P(i) = p_i / sum of all p      w_i = (N P(i))^-beta / max w

    A row can be drawn when it was appended and has not been removed since. A new one has the largest priority that any
    row has had so far, 1 at first, so that everything is soon learned from once. `alpha` = 0 draws all alike.
    `normalize` says which weight becomes 1: the largest of the "batch", or of all rows in the "buffer". N cancels out.

    Source: Schaul et al. 2016 ("Prioritized experience replay"), 3.3, 3.4 and algorithm 1. Draws are independent of one
    another, not one from each of B parts as in its B.2.1: so a batch may be cut into several.

    Where numba is installed, it compiles what is done on the host; the results are the same to the bit.

    Raises ValueError for numbers out of their range.
    """

    def __init__(
        self,
        capacity: int,
        *,
        alpha: float = 0.6,
        epsilon: float = 1e-6,
        normalize: str = "batch",
        device: torch.device | str = "cpu",
    ) -> None:
        if capacity < 1:
            raise ValueError(f"Priorities(capacity={capacity}): give 1 or more")
        if not 0.0 <= alpha <= 1.0:
            raise ValueError(f"Priorities(alpha={alpha}): give a number from 0 (all rows alike) to 1")
        if not 0.0 < epsilon < _INFINITY:
            raise ValueError(f"Priorities(epsilon={epsilon}): above 0, or a row without error is never drawn again")
        if normalize not in ("batch", "buffer"):
            raise ValueError(f'Priorities(normalize={normalize!r}): give "batch" or "buffer"')
        self.capacity = capacity
        self.alpha = alpha
        self.epsilon = epsilon
        self.normalize = normalize
        self.device = checked_device(device)
        self._priority = torch.zeros(padded(capacity), dtype=torch.float64, device=self.device)
        self._maximum = torch.ones((), dtype=torch.float64, device=self.device)
        self._rebuild()

    @property
    def _compiled(self) -> Any:
        """What works on the host, by numba; None for torch's operations. A copy may be where there is no numba."""
        return _compiled_tree() if self.device.type == "cpu" else None

    @property
    def config(self) -> dict[str, Any]:
        """What it was built with, as JSON."""
        return {
            "capacity": self.capacity,
            "alpha": self.alpha,
            "epsilon": self.epsilon,
            "normalize": self.normalize,
            "device": str(self.device),
        }

    def __getitem__(self, index_B: Tensor) -> Tensor:
        """The priorities (B,) float64 of these rows; 0 where a row cannot be drawn."""
        return self._priority.index_select(0, index_B)

    def append(self, index_B: Tensor, valid_B: Tensor | None = None) -> None:
        """These rows are new: each gets the largest priority so far, whatever it had. Those not `valid_B` get none."""
        priority_B = self._maximum.expand(len(index_B))
        self._write(index_B, priority_B if valid_B is None else priority_B * valid_B)

    def remove(self, index_B: Tensor) -> None:
        """These rows cannot be drawn until they are appended again."""
        self._write(index_B, self._maximum.new_zeros(len(index_B)))

    def sample(self, batch_size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """`batch_size` rows and their probabilities, (B,) int64 and (B,) float64; a row may come several times.

        Raises ValueError where no row can be drawn. On a device where to know that would be to wait, it is an error of
        the device.
        """
        self._refresh()
        shape = (len(self._sums), batch_size)
        uniform_LB = torch.rand(shape, generator=generator, dtype=torch.float64, device=self.device)
        empty = "Priorities.sample: there is no row that can be drawn; append one first"
        if (compiled := self._compiled) is not None:
            index_B = torch.empty(batch_size, dtype=torch.int64, device=self.device)
            probability_B = torch.empty(batch_size, dtype=torch.float64, device=self.device)
            found = index_B.numpy(), probability_B.numpy()
            if not compiled.draw(_arrays(self._sums), uniform_LB.numpy(), *found):
                raise ValueError(empty)
            return index_B, probability_B
        try:
            index_B, whole = draw(self._sums, uniform_LB.unbind())
            priority_B = self._priority.index_select(0, index_B)
        except IndexError as error:  # on the host: asking first would cost as much as a level
            raise ValueError(empty) from error
        return index_B, priority_B.div_(whole)

    def weights(self, probability_B: Tensor, beta: float) -> Tensor:
        """What to multiply the losses of rows by that were drawn with these probabilities; (B,) float32 in [0, 1].

        `beta` = 1 makes up for all of the preference, 0 for none; the paper anneals it to 1. Ask before `update`, which
        changes the probabilities.
        """
        if not len(probability_B):
            return torch.zeros(0, dtype=torch.float32, device=probability_B.device)
        found_B = _on_host(probability_B)
        if self.normalize == "batch":
            least = found_B.min()
        else:
            self._refresh()
            least = _on_host(least_positive(self._least[-1]) / total(self._sums[-1]))
        with np.errstate(divide="ignore", invalid="ignore"):  # by 0 is infinity, as torch has it
            weight_B = (least / found_B) ** float(beta)
        return weight_B.float() if isinstance(weight_B, Tensor) else torch.from_numpy(weight_B.astype(np.float32))

    def update(self, index_B: Tensor, td_error_B: Tensor) -> None:
        """These rows were learned from, with errors of these sizes. A row that comes twice takes the larger one.

        A row that was removed meanwhile stays so. An error that is not finite leaves its row what it was.
        Raises ValueError where errors are not of the shape of the rows, IndexError for rows that there are not.
        """
        if index_B.shape != td_error_B.shape:
            given = f"rows {tuple(index_B.shape)}, and errors {tuple(td_error_B.shape)}"
            raise ValueError(f"Priorities.update: {given}; give one error for each row")
        if not len(index_B):
            return
        new_B = (abs(_on_host(td_error_B.detach().double())) + self.epsilon) ** self.alpha
        if (compiled := self._compiled) is not None:
            compiled.update(_arrays(self._sums), index_B.contiguous().numpy(), new_B, self._maximum.numpy())
            if self._least:
                self._outdate(index_B)
            return
        priority_B = new_B if isinstance(new_B, Tensor) else torch.from_numpy(new_B)
        before_B = self._priority.index_select(0, index_B)
        bound_B = before_B * _INFINITY  # NaN where it was 0: nothing is below that
        priority_B = torch.where(priority_B < bound_B, priority_B, before_B)
        torch.maximum(self._maximum, priority_B.amax(), out=self._maximum)
        self._priority.scatter_reduce_(0, index_B, priority_B, "amax", include_self=False)  # in any order the same
        self._outdate(index_B)

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next draws depend on."""
        stale = torch.cat(self._stale) if self._stale else torch.zeros(0, dtype=torch.int64, device=self.device)
        return {"priority": self._priority, "sums": self._sums[1:], "stale": stale, "maximum": self._maximum}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave; ValueError for the state of another capacity, or a damaged one."""
        priority, sums, stale, maximum = (state[name] for name in ("priority", "sums", "stale", "maximum"))
        given, mine = ([tuple(x.shape) for x in levels] for levels in ([priority, *sums], self._sums))
        if given != mine:
            raise ValueError(f"priority and sums of {self.capacity} rows have the shapes {mine}, not {given}")
        if len(stale) and not 0 <= int(stale.amin()) <= int(stale.amax()) < len(priority) >> SHIFT:
            raise ValueError(f"stale names blocks from {int(stale.amin())} to {int(stale.amax())}, which there are not")
        self._priority.copy_(priority)
        self._maximum.copy_(maximum)
        self._rebuild()
        for above, saved in zip(self._sums[1:], sums, strict=True):
            above.copy_(saved)  # to the last bit, which may depend on how many blocks were summed in one go
        if len(stale):
            self._stale = [stale.to(self.device, copy=True)]
            self._stale_rows = len(stale)

    def _write(self, index_B: Tensor, priority_B: Tensor) -> None:
        self._priority.index_copy_(0, index_B, priority_B)
        self._outdate(index_B)

    def _outdate(self, index_B: Tensor) -> None:
        """What stands above these rows is true no longer: the next draw puts it right, for all of them in one go."""
        if len(self._sums) > 1:
            self._stale.append(index_B >> SHIFT)
            self._stale_rows += len(index_B)
            if self._stale_rows >= len(self._priority) >> SHIFT:
                self._rebuild()  # which costs no more by now

    def _refresh(self) -> None:
        if self._stale:
            block_B = self._stale[0] if len(self._stale) == 1 else torch.cat(self._stale)
            if (compiled := self._compiled) is not None:
                compiled.refresh(_arrays(self._sums), block_B.numpy())
            else:
                refresh_(self._sums, block_B, total)
            if self._least:
                refresh_(self._least, block_B, least_positive)
            self._stale, self._stale_rows = [], 0

    def _rebuild(self) -> None:
        self._sums = levels_of(self._priority, total)
        self._least = levels_of(self._priority, least_positive) if self.normalize == "buffer" else []
        self._stale: list[Tensor] = []  # blocks in which a priority has changed, and nothing above it yet
        self._stale_rows = 0


@functools.cache
def _compiled_tree() -> Any:
    """`rein.replay.compiled_tree`, which takes half a second to import; None without numba that works."""
    if backend.PLAIN or importlib.util.find_spec("numba") is None:
        return None
    try:
        return importlib.import_module("rein.replay.compiled_tree")
    except ImportError as error:  # numba refuses versions of numpy that are newer than it
        logger.warning("prioritized replay goes without numba, which is installed and cannot be imported: %s", error)
        return None


def _on_host(x_B: Tensor) -> Any:
    """The same memory as an array where it is the host's: for so few numbers numpy takes half of torch's time."""
    return x_B.numpy() if x_B.device.type == "cpu" else x_B


def _arrays(levels: list[Tensor]) -> tuple[Any, ...]:
    """The same memory, as numba takes it."""
    return tuple([level.numpy() for level in levels])
