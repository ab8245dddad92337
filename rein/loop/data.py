"""The loop's source of batches: any iterable, iterated anew each epoch, or an iterator that is used up once."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sized
from typing import Any

import torch

from rein.ops.trees import to_device

END: Any = object()  # what `take` returns when the data has ended
EMPTY = "run(data=...): the data is empty; give None to run without data"


class Batches:
    """Hands out elements one by one, takes one back, and knows where it stands."""

    def __init__(self, data: Iterable[Any], device: torch.device | str | None = None) -> None:
        if not isinstance(data, Iterable):
            raise TypeError(f"run(data=...): an iterable of batches, not {type(data).__name__}")
        # a DataLoader over a stream has a __len__ that raises: not knowing is not empty
        if isinstance(data, Sized) and operator.length_hint(data, 1) == 0:
            raise ValueError(EMPTY)
        self.data = data
        self.one_shot = isinstance(data, Iterator)
        self._device = device
        self._iterator: Iterator[Any] = iter(data) if self.one_shot else iter(())
        self._returned: list[Any] = []
        self._taken_any = False
        self._underway = False  # whether the iterator stands where the epoch does

    def begin_epoch(self, skip: int = 0) -> None:
        """Iterate anew, past the first `skip` elements (a resumed epoch); an iterator goes on where it is.

        So does that of an epoch which was left open in this process: it knows the order, a new one may have another.
        """
        if not self.begins_anew(skip):
            return
        self._iterator, self._returned, self._underway = iter(self.data), [], False
        for _ in range(skip):
            if next(self._iterator, END) is END:
                raise ValueError(f"run(data=...): the open epoch stood at element {skip}, but the data ends before")
        self._underway = True

    def begins_anew(self, skip: int) -> bool:
        """Whether `begin_epoch(skip)` iterates the data from its first element."""
        return not (self.one_shot or (skip and self._underway))

    def exhausted(self) -> bool:
        """Whether an iterator has nothing left; data that can be iterated anew never is."""
        if not self.one_shot:
            return False
        if not self._returned:
            element = next(self._iterator, END)
            if element is END:
                if not self._taken_any:
                    raise ValueError(EMPTY)
                return True
            self._returned.append(element)
        return False

    def take(self, iteration: int) -> Any:
        """The next element on the device, or END. Raises ValueError when an epoch's first one is missing."""
        try:
            element = self._returned.pop() if self._returned else next(self._iterator, END)
        except BaseException:  # raised again
            self._underway = False  # a generator that has raised has ended
            raise
        if element is END:
            self._iterator = self._iterator if self.one_shot else iter(())  # it may be asked once more
            if iteration == 0 and not self.one_shot:
                raise ValueError(EMPTY)
            return END
        self._taken_any = True
        return element if self._device is None else to_device(element, self._device)

    def give_back(self, element: Any) -> None:
        """Put back an element whose step was skipped or failed: it is the next one taken."""
        self._returned.append(element)
