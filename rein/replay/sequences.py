"""Replay buffer of sequences, and streams of sequences as a dataset.

Shapes: T steps, P steps before them, B sequences, N environments.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from rein.ops.random import generator, restore
from rein.ops.trees import checked_device, leaves, map_tree, to_device
from rein.replay.replay import LEARNED, Replay
from rein.replay.storage import Packing
from rein.types import Tree


class Clips(NamedTuple):
    """Parts of episodes, time-major; where one has fewer than T steps, another row of it stands in for the rest."""

    row: Tensor  # (T, B) int64: which ones they are
    valid: Tensor  # (T, B) bool: False where a row only stands in
    first: Tensor  # (B,) int64, from 0 to P: the step with which each begins
    observation: Tree  # (T, B, ...)
    action: Tree
    reward: Tensor
    terminated: Tensor
    next_observation: Tree  # one row after each, whatever the stride
    fields: Mapping[str, Tree]  # (T, B, ...), others that were asked for
    begin: Mapping[str, Tree]  # (B, ...), of the first step alone: the carry that was acted with


class SequenceReplay(Replay):
    """A replay from which clips are drawn: `length` rows of one environment, each `stride`-th, in order of time.

    None reaches over an end, a reset or a row that is not valid, nor from the newest row to the oldest. Each row that
    one may begin with is as likely as any: all valid ones, and a clip is padded where less is left of the episode; or,
    for `whole` clips, those that enough rows follow. Up to `before` rows in front of that one come along, as many as
    there are of the episode: to warm up what a network remembers (`Clips.first` says where).

    Raises ValueError for numbers out of their range.
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
        self.length, self.before, self.stride, self.whole = length, before, stride, whole
        self._least = (length - 1) * stride if whole else 0  # rows of its episode that come before one that is drawn
        # the number of rows of its episode before each row; -1 where a row is no data
        self._step_SN = torch.empty(0, dtype=torch.int64, device="cpu")
        self._step_N = torch.zeros(0, dtype=torch.int64, device="cpu")  # of the rows to come

    def __len__(self) -> int:
        """Rows that a clip may begin with."""
        count = super().__len__()
        return count - self._cut_off() if count else 0

    def observe_reset(self, mask: Tensor) -> None:
        """The environments in `mask` (N,) were reset outside a step: no clip reaches over that."""
        super().observe_reset(mask)
        if self.filled:
            self._step_N = self._step_N.masked_fill(mask, 0)

    def clips(
        self, batch_size: int, generator: torch.Generator, *, fields: Sequence[str] = (), begin: Sequence[str] = ()
    ) -> Clips:
        """`batch_size` clips, with replacement; `fields` and `begin` are names of what else to have of them.

        Raises ValueError where there is no row to begin from.
        """
        self.flush()
        self._packed()
        skip = self._cut_off()
        if self._valid.count <= skip:
            kind = f"whole clip of {self.length} rows" if self.whole else "clip"
            raise ValueError(f"no {kind} begins with any of the {self.filled * self.num_envs} rows of the replay")
        drawn_B = self._valid.draw(batch_size, generator, True, skip=skip, oldest=self._oldest * self.num_envs)
        return self._from(
            self._later(drawn_B, torch.tensor(-self._least, dtype=torch.int64, device=self.device)), None, fields, begin
        )

    def newest(self, *, fields: Sequence[str] = (), begin: Sequence[str] = ()) -> Clips:
        """The newest clip of each environment, (T, N); where one has none yet, not a step of it is valid."""
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
        """The clips whose first row after those `before` is this one."""
        offset_T1 = torch.arange(-self.before, self.length, device=self.device).unsqueeze(1) * self.stride
        index_TB = self._later(start_B, offset_T1)
        flat = self._step_SN.view(-1)
        step_B, slot_B = flat[start_B], start_B // self.num_envs
        behind_B = torch.minimum(step_B, (slot_B - self._oldest) % self.slots)
        ahead_B = (self.next_slot - 1 - slot_B) % self.slots
        inside_TB = (-behind_B <= offset_T1) & (offset_T1 <= ahead_B)
        valid_TB = inside_TB & (flat[index_TB] == step_B + offset_T1)  # in one episode steps follow one another
        if exists_B is not None:
            valid_TB &= exists_B
        index_TB = torch.where(valid_TB, index_TB, start_B)
        first_B = self.before - valid_TB[: self.before].sum(0)
        found: dict[str, Any] = self._shaped(index_TB, (*LEARNED, *fields))
        learned = {name: found.pop(name) for name in LEARNED}
        of_first = self._rows(index_TB.gather(0, first_B.unsqueeze(0))[0], tuple(begin)) if begin else {}
        return Clips(index_TB, valid_TB, first_B, **learned, fields=found, begin=of_first)

    def _shaped(self, index_TB: Tensor, names: tuple[str, ...]) -> dict[str, Tree]:
        return map_tree(lambda rows: rows.unflatten(0, index_TB.shape), self._rows(index_TB.flatten(), names))

    @property
    def _oldest(self) -> int:
        """The slot whose rows will be overwritten first."""
        return self.next_slot if self.filled == self.slots else 0

    def _cut_off(self) -> int:
        """How many of the rows that may be drawn are the last of clips whose first is overwritten already."""
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


Item = TypeVar("Item")


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


def prefetch(batches: Iterable[Item], device: torch.device | str) -> Iterator[Item]:
    """The same batches, trees of tensors, on a device: each begins its way there while the one before is used.

    One batch is drawn in advance, on every device alike, so that what is learned does not depend on which it is. To a
    CUDA device they are copied from pinned memory in a stream of their own.
    """
    device = checked_device(device)
    side = torch.cuda.Stream(device) if device.type == "cuda" else None
    coming: list[Item] = []
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
