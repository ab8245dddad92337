"""Replay buffer of sequences.

Shapes: T steps, P steps before them, B sequences, N environments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rein.ops.trees import map_tree
from rein.replay.prioritized import PrioritizedReplay
from rein.replay.replay import LEARNED, Replay
from rein.replay.storage import Packing
from rein.types import Tree


class Clips(NamedTuple):
    """Batch of sequences, time-major. A shorter sequence is padded with one of its rows."""

    row: Tensor  # (T, B) int64: row numbers
    valid: Tensor  # (T, B) bool: False for padding
    first: Tensor  # (B,) int64, from 0 to P: the first step of each sequence
    observation: Tree  # (T, B, ...)
    action: Tree
    reward: Tensor
    terminated: Tensor
    next_observation: Tree  # one row later, independent of the stride
    fields: Mapping[str, Tree]  # (T, B, ...), further requested fields
    begin: Mapping[str, Tree]  # (B, ...), requested fields of the first step only, such as the recorded carry
    probability: Tensor | None = None  # (B,) float64 sampling probability; None if uniform


class SequenceReplay(Replay):
    """Replay buffer of sequences (clips): `length` rows of one environment, every `stride`-th row, in order of time.

    A clip stays within one episode and has valid rows only. Its first row is sampled uniformly. By default any valid
    row may be the first, and a clip is padded if the episode ends earlier. With `whole`, only a row that
    is followed by enough rows of its episode may be the first. Up to `before` rows of the episode precede the first
    row, to burn in a recurrent network; `Clips.first` is the first of them.

    Raises ValueError if a number is out of range.
    """

    def __init__(
        self,
        capacity: int,
        length: int,
        *,
        before: int = 0,
        stride: int = 1,
        whole: bool = False,
        storage: str = "memory",
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(capacity, storage=storage, device=device)
        for name, count, least in (("length", length, 1), ("before", before, 0), ("stride", stride, 1)):
            if count < least:
                raise ValueError(f"SequenceReplay({name}={count}): give {least} or more")
        self.length = length
        self.before = before
        self.stride = stride
        self.whole = whole
        self._least = (length - 1) * stride if whole else 0  # rows of the episode before a sampled row
        # number of earlier rows of the episode for each row; -1 for invalid rows
        self._step_SN = torch.empty(0, dtype=torch.int64, device="cpu")
        self._step_N = torch.zeros(0, dtype=torch.int64, device="cpu")  # of the next rows

    def __len__(self) -> int:
        """Number of rows that can be the first of a clip."""
        count = super().__len__()
        return count - self._cut_off() if count else 0

    def observe_reset(self, mask: Tensor) -> None:
        """Mark a reset outside a step of the environments in `mask` (N,). Clips end there."""
        super().observe_reset(mask)
        if self.filled:
            self._step_N = self._step_N.masked_fill(mask, 0)

    def clips(
        self, batch_size: int, generator: torch.Generator, *, fields: Sequence[str] = (), begin: Sequence[str] = ()
    ) -> Clips:
        """Sample `batch_size` clips with replacement.

        Args:
            batch_size: number of clips.
            generator: random generator.
            fields: names of further fields to return for all steps.
            begin: names of further fields to return for the first step only.

        Raises:
            ValueError: if no row can be the first of a clip.
        """
        self.flush()
        self._packed()
        start_B, probability_B = self._starts(batch_size, generator)
        return self._from(start_B, None, fields, begin)._replace(probability=probability_B)

    def _starts(self, batch_size: int, generator: torch.Generator) -> tuple[Tensor, Tensor | None]:
        """Return the first rows (B,) of clips, and their probabilities (B,) unless they are equal."""
        skip = self._cut_off()
        if self._valid.count <= skip:
            kind = f"whole clip of {self.length} rows" if self.whole else "clip"
            raise ValueError(f"the replay has {self.filled * self.num_envs} rows, but no {kind} that can be sampled")
        drawn_B = self._valid.draw(batch_size, generator, True, skip=skip, oldest=self._oldest * self.num_envs)
        return self._later(drawn_B, torch.tensor(-self._least, dtype=torch.int64, device=self.device)), None

    def newest(self, *, fields: Sequence[str] = (), begin: Sequence[str] = ()) -> Clips:
        """Return the newest clip of each environment, (T, N). No step is valid if an environment has no clip yet."""
        self.flush()
        self._packed()
        step_SN = self._step_SN[: self.filled]
        slot_S1 = torch.arange(self.filled, device=self.device).unsqueeze(1)
        order_S1 = (slot_S1 - self._oldest) % self.slots
        fits_SN = torch.minimum(step_SN, order_S1) >= self._least
        order_N, last_N = torch.where(fits_SN, order_S1, -1).max(0)
        behind_N = torch.minimum(step_SN.gather(0, last_N.unsqueeze(0))[0], order_N).clamp(min=0)
        back_N = (behind_N // self.stride).clamp(max=self.length - 1) * self.stride
        row_N = last_N * self.num_envs + torch.arange(self.num_envs, device=self.device)
        return self._from(self._later(row_N, -back_N), order_N >= 0, fields, begin)

    def _from(self, start_B: Tensor, exists_B: Tensor | None, fields: Sequence[str], begin: Sequence[str]) -> Clips:
        """Return clips by their first row after the `before` rows."""
        offset_T1 = torch.arange(-self.before, self.length, device=self.device).unsqueeze(1) * self.stride
        index_TB = self._later(start_B, offset_T1)
        flat = self._step_SN.view(-1)
        step_B, slot_B = flat[start_B], start_B // self.num_envs
        behind_B = torch.minimum(step_B, (slot_B - self._oldest) % self.slots)
        ahead_B = (self.next_slot - 1 - slot_B) % self.slots
        inside_TB = (-behind_B <= offset_T1) & (offset_T1 <= ahead_B)
        valid_TB = inside_TB & (flat[index_TB] == step_B + offset_T1)  # steps of one episode are consecutive
        if exists_B is not None:
            valid_TB &= exists_B
        index_TB = torch.where(valid_TB, index_TB, start_B)
        first_B = self.before - valid_TB[: self.before].sum(0)
        columns: dict[str, Any] = self._shaped(index_TB, (*LEARNED, *fields))
        learned = {name: columns.pop(name) for name in LEARNED}
        of_first = self._rows(index_TB.gather(0, first_B.unsqueeze(0))[0], tuple(begin)) if begin else {}
        return Clips(index_TB, valid_TB, first_B, **learned, fields=columns, begin=of_first)

    def _shaped(self, index_TB: Tensor, names: tuple[str, ...]) -> dict[str, Tree]:
        return map_tree(lambda rows: rows.unflatten(0, index_TB.shape), self._rows(index_TB.flatten(), names))

    def _cut_off(self) -> int:
        """Return the number of rows in `_valid` whose clips begin with overwritten rows."""
        if not self._least or self.filled < self.slots:
            return 0
        slot_R = (torch.arange(min(self._least, self.slots), device=self.device) + self._oldest) % self.slots
        return int((self._step_SN[slot_R] >= self._least).sum())

    def _take(self, packing: Packing, slots: int) -> None:
        super()._take(packing, slots)
        self._step_SN = torch.zeros(slots, self.num_envs, dtype=torch.int32, device=self.device)
        self._step_N = torch.zeros(self.num_envs, dtype=torch.int64, device=self.device)

    def _drawable(self, first: int, count: int) -> Tensor:
        new = slice(first, first + count)
        valid_SN = self._columns["valid",][new]
        over_SN = self._columns["terminated",][new] | self._columns["truncated",][new] | ~valid_SN
        slot_S1 = torch.arange(count + 1, device=self.device).unsqueeze(1)
        after_end_SN = torch.where(over_SN, slot_S1[1:], -(1 << 62))
        began_SN = torch.cat((-self._step_N.unsqueeze(0), after_end_SN)).cummax(0).values
        step_SN = slot_S1 - began_SN
        self._step_N = step_SN[-1]
        self._step_SN[new] = step_SN[:-1].masked_fill(~valid_SN, -1)
        return self._step_SN[new] >= self._least

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Replay.load_state_dict`."""
        self._step_N = torch.zeros_like(self._step_N)
        super().load_state_dict(state)


class PrioritizedSequenceReplay(SequenceReplay, PrioritizedReplay):
    """Replay buffer of sequences with proportional prioritization: each row has the priority of the clip it begins.

    Multiply the losses of clips by `weights(clips.probability, beta)`, then call `update` with their errors.
    """

    def __init__(
        self,
        capacity: int,
        length: int,
        *,
        before: int = 0,
        alpha: float = 0.6,
        storage: str = "memory",
        device: torch.device | str = "cpu",
    ) -> None:
        """`alpha` is that of `Priorities`."""
        super().__init__(capacity, length, before=before, storage=storage, device=device)
        self.prioritize(alpha)

    def _starts(self, batch_size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return self.priorities.sample(batch_size, generator)

    def update(self, index_B: Tensor, td_error_B: Tensor) -> None:
        """Set the priorities of clips from their rows, (T, B) instead of (B,), and their TD errors."""
        super().update(index_B[self.before], td_error_B)
