"""Source of batches for the loop: an iterable that is iterated once per epoch, or an iterator used once."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sized
from typing import Any

import torch

from rein.ops.trees import map_tree, to_device

END: Any = object()  # returned by `take` at the end of the data
EMPTY = "run(data=...): the data is empty; give None to run without data"


class Batches:
    """Batches of an iterable, taken one at a time. The last one can be given back."""

    def __init__(self, data: Iterable[Any], device: torch.device | None = None) -> None:
        if not isinstance(data, Iterable):
            raise TypeError(f"run(data=...): expected an iterable of batches, got {type(data).__name__}")
        # a DataLoader over a stream has a __len__ that raises: unknown length does not mean empty
        if isinstance(data, Sized) and operator.length_hint(data, 1) == 0:
            raise ValueError(EMPTY)
        self.data = data
        self.one_shot = isinstance(data, Iterator)
        self._device = device
        self._stream = _CopyStream(device) if device is not None and device.type == "cuda" else None
        self._iterator: Iterator[Any] = iter(data) if self.one_shot else iter(())
        self._returned: list[Any] = []
        self._taken_any = False
        self._underway = False  # whether the iterator is at the position of the open epoch

    def begin_epoch(self, skip: int = 0) -> None:
        """Restart the iteration and skip the first `skip` elements (of a resumed epoch).

        An iterator continues at its position. An epoch left open in this process also continues its iteration, because
        a new iteration might have another order.
        """
        if not self.begins_anew(skip):
            return
        self._iterator, self._returned, self._underway = iter(self.data), [], False
        for _ in range(skip):
            if next(self._iterator, END) is END:
                raise ValueError(f"run(data=...): the open epoch resumes at element {skip}, but the data is shorter")
        self._underway = True

    def begins_anew(self, skip: int) -> bool:
        """Return whether `begin_epoch(skip)` restarts the iteration of the data."""
        return not (self.one_shot or (skip and self._underway))

    def exhausted(self) -> bool:
        """Return whether an iterator has no elements left. Always False for data that can be iterated again."""
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
        """Return the next element on the device, or END. Raises ValueError if an epoch has no first element."""
        if self._stream is not None:
            self._stream.finish()  # the data may overwrite the memory of the last element
        try:
            element = self._returned.pop() if self._returned else next(self._iterator, END)
        except BaseException:  # raised again
            self._underway = False  # a generator that raised has ended
            raise
        if element is END:
            self._iterator = self._iterator if self.one_shot else iter(())  # END may be requested again
            if iteration == 0 and not self.one_shot:
                raise ValueError(EMPTY)
            return END
        self._taken_any = True
        if self._stream is not None:
            return self._stream.copy(element)
        return element if self._device is None else to_device(element, self._device)

    def give_back(self, element: Any) -> None:
        """Put back an element whose step was skipped or failed, so that it is taken next."""
        self._returned.append(element)


class _CopyStream:
    """CUDA stream that copies a batch from pinned memory while the device still computes the last step.

    The elements of the data are not read ahead: the data may draw random numbers, and its order must resume exactly.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)

    def finish(self) -> None:
        """Wait until the last batch is copied."""
        self._stream.synchronize()

    def copy(self, batch: Any) -> Any:
        """Return the batch on the device. Operations on the current stream wait for it."""
        current = torch.cuda.current_stream(self._device)
        moved = map_tree(lambda leaf: self._copied(leaf, current) if isinstance(leaf, torch.Tensor) else leaf, batch)
        current.wait_stream(self._stream)
        return moved

    def _copied(self, tensor: torch.Tensor, current: torch.cuda.Stream) -> torch.Tensor:
        if tensor.device.type != "cpu" or tensor.layout is not torch.strided or tensor.requires_grad:
            return tensor.to(self._device)
        with torch.cuda.stream(self._stream):
            moved = tensor.pin_memory().to(self._device, non_blocking=True)
        moved.record_stream(current)  # its memory must not be reused before the step has ended
        return moved
