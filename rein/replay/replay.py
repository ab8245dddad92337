"""Replay buffer with uniform sampling and n-step returns.

Shapes: N environments, B rows, n steps.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rein.ops.trees import checked_device
from rein.ops.values import NStep, n_step
from rein.replay.storage import Blocks, Fields, Packing, allocate, example, fits, nest, stack_rows
from rein.types import Transition, Tree


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


LEARNED = ("observation", "action", "reward", "terminated", "next_observation")
_learned = operator.itemgetter(*LEARNED)
_STAGED, _STAGED_BYTES = 256, 1 << 20  # vector steps that are taken in together, at most, if nobody samples before


class Sample(NamedTuple):
    """Rows to learn from, (B, ...) each."""

    row: Tensor  # (B,) int64: which ones they are
    observation: Tree
    action: Tree
    reward: Tensor  # (B,) of one step, or the discounted sum of n
    terminated: Tensor  # (B,) bool: whether the task ended in these steps
    next_observation: Tree  # after these steps
    discount: Tensor | float  # (B,) of the value of next_observation: gamma^n, fewer where an episode ended before
    fields: Mapping[str, Tree]  # others that were asked for
    probability: Tensor | None = None  # (B,) float64 with which a row was drawn, where not all are alike


class Replay:
    """A ring of `capacity` transitions, uniformly sampled, with replacement or without.

    Rows lie in time and side by side in bytes (see `Packing`), so a batch is one gather. Nothing is ever sampled that
    is not `valid`, and no n-step return reaches over an end or a reset. Its memory is taken when the first transition
    comes: a MemoryError says how many bytes a `capacity` needs that does not fit; `storage="memmap"` keeps the rows in
    an unnamed file instead.
    """

    def __init__(self, capacity: int, *, storage: str = "memory", device: torch.device | str = "cpu") -> None:
        """Raises ValueError for a capacity below 1 or an unknown storage."""
        if capacity < 1:
            raise ValueError(f"capacity={capacity}: give 1 or more transitions")
        if storage not in ("memory", "memmap"):
            raise ValueError(f'storage={storage!r}: use "memory" or "memmap"')
        self.capacity, self.storage, self.device = capacity, storage, checked_device(device)
        if storage == "memmap" and self.device.type != "cpu":
            raise ValueError(f'storage="memmap": a file is on the host, and the replay is to be on {device}')
        self.num_envs = self.slots = 0  # known with the first transition
        self.filled = 0  # slots that hold rows
        self.next_slot = 0  # that the next row goes to
        self._staged: list[dict[str, Tree]] = []
        self._most_staged = 1
        self._packing: Packing | None = None
        self._bytes = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._blocks = Blocks(self._bytes)
        self._columns: dict[tuple[str, ...], Tensor] = {}
        self._fields: dict[tuple[str, ...], Fields] = {}  # by the names that were asked for
        self._like: dict[str, Any] = {}  # what a row looks like
        self._valid = Drawable()

    def __len__(self) -> int:
        """Transitions held that may be sampled."""
        self.flush()
        return self._valid.count if self._packing is not None else 0

    def append(self, transition: Transition, **more: Tree) -> None:
        """Take in one transition of every environment, and what else is to be kept of it, each (N, ...).

        Its tensors are copied later: they must not be written to any more. Raises ValueError where they are of no
        environments or differ from those before in fields, types or shapes, and MemoryError where the capacity does
        not fit.
        """
        row = transition._asdict()
        row |= row.pop("extras")
        row |= more
        if self._packing is None:
            self._allocate(row)
        if not fits(row, self._like):
            self._packed().check(row)
            raise ValueError(f"each field of a row is of {self.num_envs} environments, as its rewards were before")
        self._staged.append(row)
        if len(self._staged) >= self._most_staged:
            self.flush()

    def observe_reset(self, mask: Tensor) -> None:
        """The environments in `mask` (N,) were reset outside a step: no return reaches over that."""
        self.flush()
        if self.num_envs and len(mask) != self.num_envs:
            raise ValueError(
                f"the replay holds rows of {self.num_envs} environments, and these are {len(mask)}: go on with as "
                "many, or give fill(..., num_envs=)"
            )
        if self.filled:
            last = (self.next_slot - 1) % self.slots
            with self._blocks.writing(last * self.num_envs, (last + 1) * self.num_envs):
                self._columns["truncated",][last] |= mask & ~self._columns["terminated",][last]

    def flush(self) -> None:
        """Write down what was taken in."""
        if not self._staged:
            return
        rows, self._staged = self._staged, []
        start = 0
        with torch.no_grad():  # a row may be part of a graph, which ends here
            while start < len(rows):
                part = rows[start : start + self.slots - self.next_slot]
                self._write(stack_rows(part), len(part))
                start += len(part)

    def _write(self, rows: Mapping[str, Tree], count: int) -> None:
        first = self.next_slot
        with self._blocks.writing(first * self.num_envs, (first + count) * self.num_envs):
            for path, column in self._columns.items():
                value: Any = rows
                for name in path:
                    value = value[name]
                column[first : first + count] = value
        index_R = torch.arange(first * self.num_envs, (first + count) * self.num_envs, device=self.device)
        overwritten = min(count, max(0, self.filled + count - self.slots))
        self._valid.replace(index_R, self._drawable(first, count).flatten(), overwritten * self.num_envs)
        self.written(index_R, rows["valid"].flatten())
        self.next_slot = (first + count) % self.slots
        self.filled = min(self.filled + count, self.slots)

    def _drawable(self, first: int, count: int) -> Tensor:
        """Which rows may be drawn, (S, N), of so many slots that are new; asked once of each, in order of time."""
        return self._columns["valid",][first : first + count]

    def written(self, index_R: Tensor, valid_R: Tensor) -> None:
        """These rows are new. For subclasses that know more of a row than its numbers."""

    def _allocate(self, row: Mapping[str, Tree]) -> None:
        if not len(row["reward"]):
            raise ValueError("a transition of no environments: the first row of a replay says how many there are")
        self.num_envs = len(row["reward"])
        self._take(Packing(row), max(1, self.capacity // self.num_envs))

    def _take(self, packing: Packing, slots: int) -> None:
        rows = slots * self.num_envs
        self._bytes = allocate(rows, packing.row_bytes, self.storage, self.device)
        self._blocks = Blocks(self._bytes)
        self._packing, self.slots = packing, slots
        self._most_staged = max(1, min(_STAGED, slots, _STAGED_BYTES // (self.num_envs * packing.row_bytes)))
        self._columns = packing.columns(self._bytes.view(slots, self.num_envs, packing.row_bytes))
        self._fields = {}
        self._like = packing.like(self.num_envs)
        self._valid = Drawable(rows, self.device)

    def sample(
        self,
        batch_size: int,
        generator: torch.Generator,
        *,
        n_step: int = 1,
        gamma: float = 0.99,
        replacement: bool = True,
        fields: Sequence[str] = (),
    ) -> Sample:
        """`batch_size` rows, each as likely as any; `fields` are the names of others to have.

        With `n_step` the reward is the discounted sum of as many, fewer where the episode ended or was cut before, or
        where nothing newer is known yet, and next_observation is what came after them. Raises ValueError where there
        are too few rows to sample from.
        """
        self.flush()
        index_B = self._valid.draw(batch_size, generator, replacement)
        return self._found(index_B, n_step, gamma, fields)

    def take(self, index_B: Tensor, *, n_step: int = 1, gamma: float = 0.99, fields: Sequence[str] = ()) -> Sample:
        """The rows of these numbers, as `sample` gives them: row n of slot s is s * num_envs + n.

        Raises IndexError for rows that there are not.
        """
        if self.device.type == "cpu" and index_B.numel() and int(index_B.min()) < 0:  # elsewhere to ask is to wait
            raise IndexError(f"take: there is no row {int(index_B.min())}; rows are counted from 0")
        return self._found(index_B, n_step, gamma, fields)

    def _found(self, index_B: Tensor, n_step: int, gamma: float, fields: Sequence[str]) -> Sample:
        if n_step == 1:
            found = self._rows(index_B, (*LEARNED, *fields))
            asked = {name: found[name] for name in fields}
            return Sample(index_B, *_learned(found), gamma, asked)  # type: ignore[call-arg]  # the fields that follow
        found = self._rows(index_B, ("observation", "action", *fields))
        window = self._window(index_B, n_step, gamma)
        last_B = self._later(index_B, window.last)
        after = self._rows(last_B, ("next_observation",))["next_observation"]
        asked, learned = {name: found[name] for name in fields}, (found["observation"], found["action"])
        return Sample(index_B, *learned, window.return_, window.terminated, after, window.discount, asked)

    def _rows(self, index_B: Tensor, names: tuple[str, ...]) -> dict[str, Tree]:
        """Some fields of these rows, (B, ...), by one gather. That there are such rows is for who asks to know."""
        self.flush()
        fields = self._fields.get(names)
        if fields is None:
            fields = self._fields[names] = self._packed().fields(names)
        return fields.of(self._bytes, index_B)

    def _window(self, index_B: Tensor, steps: int, gamma: float) -> NStep:
        """The returns of the next steps, of which those that are not known yet are not valid."""
        ahead_n1 = torch.arange(steps, device=self.device).unsqueeze(1)
        index_nB = self._later(index_B, ahead_n1)
        newest = (self.next_slot - 1) % self.slots
        left_B = (newest - index_B // self.num_envs) % self.slots  # slots between a row and the newest one
        flat = [self._columns[name,].flatten() for name in ("reward", "terminated", "truncated", "valid")]
        reward, terminated, truncated, valid = (column[index_nB] for column in flat)
        return n_step(reward, terminated, truncated, valid & (ahead_n1 <= left_B), gamma=gamma)

    def _later(self, index_B: Tensor, steps: Tensor) -> Tensor:
        return (index_B + steps * self.num_envs) % (self.slots * self.num_envs)

    def _packed(self) -> Packing:
        if self._packing is None:
            raise ValueError("the replay is empty: append transitions before sampling")
        return self._packing

    @property
    def columns(self) -> dict[str, Tree]:
        """The fields of all slots, (S, N, ...), as views, the rows in the ring's order."""
        self.flush()
        return nest(self._columns, (column[: self.filled] for column in self._columns.values()))

    def state_dict(self) -> dict[str, Any]:
        """The rows in `Blocks`, which stay the same until the ring comes round to them."""
        self.flush()
        if self._packing is None:
            return {"filled": 0}
        return {
            "filled": self.filled,
            "next_slot": self.next_slot,
            "slots": self.slots,
            "num_envs": self.num_envs,
            "layout": self._packing.config,
            "blocks": self._blocks.split(self.filled * self.num_envs),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave. Raises ValueError for that of another capacity."""
        self._staged = []
        if not state["filled"]:
            self.filled = self.next_slot = 0
            self._valid = Drawable(self.slots * self.num_envs, self.device)
            return
        num_envs, slots = int(state["num_envs"]), int(state["slots"])
        if slots != max(1, self.capacity // num_envs):
            raise ValueError(f"the replay holds {slots * num_envs} transitions in the state, and {self.capacity} here")
        packing = Packing(example(state["layout"]))
        if self._packing is None or packing.config != self._packing.config or self.num_envs != num_envs:
            self.num_envs = num_envs
            self._take(packing, slots)
        filled, next_slot = int(state["filled"]), int(state["next_slot"])
        if not (0 < filled <= slots > next_slot >= 0):
            raise ValueError(f"the replay has {filled} of {slots} slots, the next one {next_slot}, in the state")
        self._blocks.fill("blocks", state["blocks"], filled * num_envs)
        self.filled, self.next_slot = filled, next_slot
        self._valid = self._look_for_valid()

    def _look_for_valid(self) -> Drawable:
        """From the oldest row to the newest one, as they came."""
        rows, found = self.slots * self.num_envs, Drawable(self.slots * self.num_envs, self.device)
        oldest = self.next_slot if self.filled == self.slots else 0
        index_R = (torch.arange(self.filled * self.num_envs, device=self.device) + oldest * self.num_envs) % rows
        drawable_SN = torch.cat((self._drawable(oldest, self.filled - oldest), self._drawable(0, oldest)))
        found.replace(index_R, drawable_SN.flatten(), 0)
        return found
