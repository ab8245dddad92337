"""Clips without end for whoever asks for an iterable, and the next batch on its way while the current one is used.

stream = ClipStream(replay, batch_size=32, seed=0)
for clips in prefetch(stream, "cuda"): ...

loader = DataLoader(stream, batch_size=None, num_workers=2, pin_memory=True)     # of a replay that is full
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from rein.buffers.sequences import Clips, SequenceReplay
from rein.ops.devices import checked_device
from rein.ops.random import generator, restore
from rein.ops.trees import leaves, map_tree, to_device

Batch = TypeVar("Batch")


class ClipStream(IterableDataset[Clips]):
    """Batches of clips without end, of the replay as it is when each of them is asked for.

    What they are drawn with goes on from one iteration to the next, and is its state. In a `DataLoader`, which wants
    `batch_size=None`, workers draw from the replay as it was when they began, each under a seed that the loader gives.
    """

    def __init__(
        self,
        replay: SequenceReplay,
        batch_size: int,
        *,
        seed: int,
        fields: Sequence[str] = (),
        begin: Sequence[str] = (),
    ) -> None:
        """`fields` and `begin` are those of `SequenceReplay.clips`."""
        super().__init__()
        self._replay, self._batch_size, self._asked = replay, batch_size, {"fields": fields, "begin": begin}
        self._generator = generator(seed, "clips", device=replay.device)

    def __iter__(self) -> Iterator[Clips]:
        """Never ends."""
        worker = get_worker_info()
        drawn = self._generator if worker is None else generator(worker.seed, "clips", device=self._replay.device)
        while True:
            yield self._replay.clips(self._batch_size, drawn, **self._asked)

    def state_dict(self) -> dict[str, Any]:
        """The generator of what comes next; the replay has a state of its own."""
        return {"generator": self._generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave."""
        restore(self._generator, state["generator"])


def prefetch(batches: Iterable[Batch], device: torch.device | str) -> Iterator[Batch]:
    """The same batches, trees of tensors, on a device: each begins its way there while the one before is used.

    One batch is drawn in advance, on every device alike, so that what is learned does not depend on which it is. To a
    CUDA device they are copied from pinned memory in a stream of their own.
    """
    device = checked_device(device)
    side = torch.cuda.Stream(device) if device.type == "cuda" else None
    coming: list[Batch] = []
    for batch in batches:
        coming.append(_send(batch, device, side))
        if len(coming) == 2:
            yield _receive(coming.pop(0), device, side)
    for batch in coming:
        yield _receive(batch, device, side)


def _send(batch: Any, device: torch.device, side: torch.cuda.Stream | None) -> Any:
    if side is None:
        return to_device(batch, device)
    side.wait_stream(torch.cuda.current_stream(device))  # what is there already may still be being computed
    with torch.cuda.stream(side):
        return to_device(map_tree(_pinned, batch), device, non_blocking=True)


def _pinned(leaf: Any) -> Any:
    return leaf.pin_memory() if isinstance(leaf, Tensor) and leaf.device.type == "cpu" else leaf


def _receive(batch: Any, device: torch.device, side: torch.cuda.Stream | None) -> Any:
    """The batch, when whatever uses it here is bound to wait for its arrival."""
    if side is not None:
        here = torch.cuda.current_stream(device)
        here.wait_stream(side)
        for _, leaf in leaves(batch):
            if isinstance(leaf, Tensor) and leaf.is_cuda:
                leaf.record_stream(here)  # or its memory could be given away while it is in use
    return batch
