"""Which rows of a ring may be drawn, and draws of which each of them is as likely as any.

Shapes: R rows, B rows of a batch.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Drawable:
    """Which rows may be drawn: all of the ring, until there is one that may not; then a list, as a ring of its own."""

    def __init__(self, rows: int = 0, device: torch.device | str = "cpu") -> None:
        self.rows, self.device = rows, torch.device(device)
        self.count = 0  # rows that may be drawn
        self._list: Tensor | None = None  # their numbers, from `_first` on, `count` of them
        self._first = 0
        # by number: whether a row may be drawn; only with a list
        self._kept = torch.empty(0, dtype=torch.bool, device="cpu")

    def replace(self, index_R: Tensor, valid_R: Tensor, overwritten: int) -> None:
        """These rows are new, the first `overwritten` of them in place of the oldest ones."""
        if self._list is None:
            if bool(valid_R.all()):
                self.count = min(self.rows, self.count + len(index_R))
                return
            self._begin_list(int(index_R[0]))
        gone = int(self._kept[index_R[:overwritten]].sum()) if overwritten else 0
        new = index_R[valid_R]
        place = (self._first + self.count + torch.arange(len(new), device=self.device)) % self.rows
        self._list[place] = new  # type: ignore[index]  # begun above
        self._kept[index_R] = valid_R
        self._first, self.count = (self._first + gone) % self.rows, self.count - gone + len(new)
        if self.count == self.rows:  # as after loading, where nobody knows that it was ever otherwise
            self._list = None

    def _begin_list(self, next_row: int) -> None:
        """All rows so far, from the oldest on."""
        first = next_row if self.count == self.rows else 0
        number = torch.arange(self.rows, device=self.device)
        self._list, self._kept = (number + first) % self.rows, torch.zeros_like(number, dtype=torch.bool)
        self._kept[self._list[: self.count]] = True
        self._first = 0

    def draw(
        self, batch_size: int, generator: torch.Generator, replacement: bool, *, skip: int = 0, oldest: int = 0
    ) -> Tensor:
        """Numbers of rows, each as likely as any but for the `skip` oldest ones; the ring begins with row `oldest`."""
        count = max(0, self.count - skip)
        if not count or (not replacement and count < batch_size):
            raise ValueError(f"the replay has {count} valid transitions to sample {batch_size} from")
        if replacement:
            drawn = torch.randint(count, (batch_size,), generator=generator, device=self.device)
        else:
            drawn = torch.randperm(count, generator=generator, device=self.device)[:batch_size]
        if self._list is None:
            return (drawn + (skip + oldest)) % self.rows if skip else drawn
        return self._list[(drawn + (self._first + skip)) % self.rows]
