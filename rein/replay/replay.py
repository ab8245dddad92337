"""Replay buffer with uniform sampling and n-step returns.

Shapes: N environments, B rows, n steps.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rein.ops.trees import checked_device, map_tree
from rein.ops.values import NStep, n_step
from rein.replay.storage import Blocks, Fields, Packing, allocate, example, fits, nest, stack_rows
from rein.types import Transition, Tree


class Drawable:
    """Set of the rows that can be sampled: the whole ring, or a list of rows once a row is excluded."""

    def __init__(self, rows: int = 0, device: torch.device | str = "cpu") -> None:
        self.rows = rows
        self.device = torch.device(device)
        self.count = 0  # number of rows that can be sampled
        self._list: Tensor | None = None  # ring of `count` row numbers that begins at `_first`
        self._first = 0
        # whether each row can be sampled; used with `_list` only
        self._drawable = torch.empty(0, dtype=torch.bool, device="cpu")

    def replace(self, index_R: Tensor, valid_R: Tensor, overwritten: int) -> None:
        """Add rows. The first `overwritten` of them replace the oldest rows."""
        if self._list is None:
            if bool(valid_R.all()):
                self.count = min(self.rows, self.count + len(index_R))
                return
            self._begin_list(int(index_R[0]))
        gone = int(self._drawable[index_R[:overwritten]].sum()) if overwritten else 0
        new = index_R[valid_R]
        place = (self._first + self.count + torch.arange(len(new), device=self.device)) % self.rows
        self._list[place] = new  # type: ignore[index]  # created above
        self._drawable[index_R] = valid_R
        self._first = (self._first + gone) % self.rows
        self.count = self.count - gone + len(new)
        if self.count == self.rows:  # as after loading a state
            self._list = None

    def _begin_list(self, next_row: int) -> None:
        """Create the list with all rows so far, the oldest first."""
        first = next_row if self.count == self.rows else 0
        number = torch.arange(self.rows, device=self.device)
        self._list = (number + first) % self.rows
        self._drawable = torch.zeros_like(number, dtype=torch.bool)
        self._drawable[self._list[: self.count]] = True
        self._first = 0

    def draw(
        self, batch_size: int, generator: torch.Generator, replacement: bool, *, skip: int = 0, oldest: int = 0
    ) -> Tensor:
        """Sample row numbers uniformly, without the `skip` oldest rows. `oldest` is the oldest row of the ring."""
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
_STAGED, _STAGED_BYTES = 256, 1 << 20  # most vector steps that are written together


class Sample(NamedTuple):
    """Batch of rows, (B, ...) each."""

    row: Tensor  # (B,) int64: row numbers
    observation: Tree
    action: Tree
    reward: Tensor  # (B,) reward of one step, or the discounted sum of n
    terminated: Tensor  # (B,) bool: whether the task ended within these steps
    next_observation: Tree  # after these steps
    discount: Tensor | float  # (B,) of the value of next_observation: gamma^n, n smaller if the episode ended before
    fields: Mapping[str, Tree]  # further requested fields
    probability: Tensor | None = None  # (B,) float64 sampling probability; None if uniform


class Replay:
    """Ring buffer of `capacity` transitions, sampled uniformly with or without replacement.

    The fields of a row are packed side by side (see `Packing`), so a batch is one gather. Only `valid` rows are
    sampled, and n-step returns end at the end of an episode or at a reset. Memory is allocated at the first transition.
    If it does not suffice, a MemoryError with the required number of bytes is raised. `storage="memmap"` keeps the rows
    in an unnamed file instead.
    """

    def __init__(self, capacity: int, *, storage: str = "memory", device: torch.device | str = "cpu") -> None:
        """Raises ValueError if `capacity` is below 1 or `storage` is unknown."""
        if capacity < 1:
            raise ValueError(f"capacity={capacity}: give 1 or more transitions")
        if storage not in ("memory", "memmap"):
            raise ValueError(f'storage={storage!r}: use "memory" or "memmap"')
        self.capacity = capacity
        self.storage = storage
        self.device = checked_device(device)
        if storage == "memmap" and self.device.type != "cpu":
            raise ValueError(f'storage="memmap" works on the CPU only, not on {device}')
        self.num_envs = self.slots = 0  # set at the first transition
        self.filled = 0  # number of slots with rows
        self.next_slot = 0  # slot of the next row
        self._staged: list[dict[str, Tree]] = []
        self._most_staged = 1
        self._packing: Packing | None = None
        self._bytes = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._blocks = Blocks(self._bytes)
        self._columns: dict[tuple[str, ...], Tensor] = {}
        self._fields: dict[tuple[str, ...], Fields] = {}  # by requested names
        self._like: dict[str, Any] = {}  # shapes and dtypes of a row
        self._valid = Drawable()

    def __len__(self) -> int:
        """Number of transitions that can be sampled."""
        self.flush()
        return self._valid.count if self._packing is not None else 0

    def append(self, transition: Transition, **more: Tree) -> None:
        """Append one transition of every environment, with further fields `more`, each (N, ...).

        The tensors are copied later; do not write to them. Raises ValueError if there are no environments, or if
        fields, dtypes or shapes differ from earlier transitions. Raises MemoryError if the capacity does not fit.
        """
        row = transition._asdict()
        row |= row.pop("extras")
        row |= more
        if self._packing is None:
            self._allocate(row)
        if not fits(row, self._like):
            self._packed().check(row)
            raise ValueError(f"each field of a row must have {self.num_envs} environments, as in earlier rows")
        self._staged.append(row)
        if len(self._staged) >= self._most_staged:
            self.flush()

    def observe_reset(self, mask: Tensor) -> None:
        """Mark a reset outside a step of the environments in `mask` (N,). Returns end there."""
        self.flush()
        if self.num_envs and len(mask) != self.num_envs:
            raise ValueError(
                f"the replay has rows of {self.num_envs} environments, not {len(mask)}; continue with "
                f"{self.num_envs} environments, or use fill_replay(..., num_envs={len(mask)})"
            )
        if self.filled:
            last = (self.next_slot - 1) % self.slots
            with self._blocks.writing(last * self.num_envs, (last + 1) * self.num_envs):
                self._columns["truncated",][last] |= mask & ~self._columns["terminated",][last]

    def flush(self) -> None:
        """Write the appended rows."""
        if not self._staged:
            return
        rows, self._staged = self._staged, []
        start = 0
        with torch.no_grad():  # rows may require gradients
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
        """Return which rows of `count` new slots can be sampled, (S, N). Called once per slot, in order of time."""
        return self._columns["valid",][first : first + count]

    def written(self, index_R: Tensor, valid_R: Tensor) -> None:
        """Called with new rows (R,). Subclasses override it."""

    def _allocate(self, row: Mapping[str, Tree]) -> None:
        if not len(row["reward"]):
            raise ValueError("the first transition of a replay has no environments; append rows of at least one")
        self.num_envs = len(row["reward"])
        self._take(Packing(row), max(1, self.capacity // self.num_envs))

    def _take(self, packing: Packing, slots: int) -> None:
        rows = slots * self.num_envs
        self._bytes = allocate(rows, packing.row_bytes, self.storage, self.device)
        self._blocks = Blocks(self._bytes)
        self._packing = packing
        self.slots = slots
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
        """Sample `batch_size` rows uniformly. `fields` are names of further fields to return.

        With `n_step` the reward is the discounted sum of n rewards, and next_observation is the observation after them.
        n is smaller if the episode ends earlier or newer rows are missing. Raises ValueError if there are too few rows.
        """
        self.flush()
        index_B, probability_B = self._draw(batch_size, generator, replacement)
        sample = self._sample_of(index_B, n_step, gamma, fields)
        return sample if probability_B is None else sample._replace(probability=probability_B)

    def _draw(self, batch_size: int, generator: torch.Generator, replacement: bool) -> tuple[Tensor, Tensor | None]:
        """Return row numbers (B,), and their probabilities (B,) unless they are equal."""
        return self._valid.draw(batch_size, generator, replacement), None

    def take(self, index_B: Tensor, *, n_step: int = 1, gamma: float = 0.99, fields: Sequence[str] = ()) -> Sample:
        """Return rows by number, as `sample` does. Environment n of slot s is row `s * num_envs + n`.

        Raises IndexError if a row is out of range.
        """
        if self.device.type == "cpu" and index_B.numel() and int(index_B.min()) < 0:  # waits on a GPU
            raise IndexError(f"take: row {int(index_B.min())} is out of range; rows are counted from 0")
        return self._sample_of(index_B, n_step, gamma, fields)

    def _sample_of(self, index_B: Tensor, n_step: int, gamma: float, fields: Sequence[str]) -> Sample:
        if n_step == 1:
            rows = self._rows(index_B, (*LEARNED, *fields))
            further = {name: rows[name] for name in fields}
            return Sample(index_B, *_learned(rows), gamma, further)  # type: ignore[call-arg]  # a tuple of 5 fields
        rows = self._rows(index_B, ("observation", "action", *fields))
        window = self._window(index_B, n_step, gamma)
        last_B = self._later(index_B, window.last)
        after = self._rows(last_B, ("next_observation",))["next_observation"]
        further, learned = {name: rows[name] for name in fields}, (rows["observation"], rows["action"])
        return Sample(index_B, *learned, window.return_, window.terminated, after, window.discount, further)

    def _rows(self, index_B: Tensor, names: tuple[str, ...]) -> dict[str, Tree]:
        """Return some fields of rows, (B, ...), with one gather. The caller checks the range of the rows."""
        self.flush()
        fields = self._fields.get(names)
        if fields is None:
            fields = self._fields[names] = self._packed().fields(names)
        return fields.of(self._bytes, index_B)

    def _window(self, index_B: Tensor, steps: int, gamma: float) -> NStep:
        """Return the n-step returns of rows. Steps that are not recorded yet are not valid."""
        index_nB, recorded_nB = self._ahead(index_B, steps)
        reward, terminated, truncated, valid = self._flags(index_nB)
        return n_step(reward, terminated, truncated, valid & recorded_nB, gamma=gamma)

    def _ahead(self, index_B: Tensor, steps: int) -> tuple[Tensor, Tensor]:
        """Return the rows (n, B) from each row on, and whether they are recorded."""
        ahead_n1 = torch.arange(steps, device=self.device).unsqueeze(1)
        newest = (self.next_slot - 1) % self.slots
        left_B = (newest - index_B // self.num_envs) % self.slots  # slots from a row to the newest one
        return self._later(index_B, ahead_n1), ahead_n1 <= left_B

    def _flags(self, index: Tensor) -> list[Tensor]:
        """Return reward, terminated, truncated and valid of rows."""
        return [self._columns[name,].flatten()[index] for name in ("reward", "terminated", "truncated", "valid")]

    def _later(self, index_B: Tensor, steps: Tensor) -> Tensor:
        return (index_B + steps * self.num_envs) % (self.slots * self.num_envs)

    def _packed(self) -> Packing:
        if self._packing is None:
            raise ValueError("the replay is empty: append transitions before sampling")
        return self._packing

    @property
    def columns(self) -> dict[str, Tree]:
        """Views of the fields of all slots, (S, N, ...), in the order of the ring."""
        self.flush()
        return nest(self._columns, (column[: self.filled] for column in self._columns.values()))

    def chronological(self) -> dict[str, Tree]:
        """Return the fields of all slots, (S, N, ...), the oldest slot first. The tensors are copies."""
        columns = self.columns
        return map_tree(lambda column: column.roll(-self._oldest, 0), columns)

    @property
    def _oldest(self) -> int:
        """Slot of the oldest rows."""
        return self.next_slot if self.filled == self.slots else 0

    def state_dict(self) -> dict[str, Any]:
        """Return the rows as blocks, which stay the same until the ring overwrites them."""
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
        """Load what `state_dict` returned. Raises ValueError if it has another capacity."""
        self._staged = []
        if not state["filled"]:
            self.filled = self.next_slot = 0
            self._valid = Drawable(self.slots * self.num_envs, self.device)
            return
        num_envs, slots = int(state["num_envs"]), int(state["slots"])
        if slots != max(1, self.capacity // num_envs):
            raise ValueError(f"the state is of a replay of {slots * num_envs} transitions, not {self.capacity}")
        packing = Packing(example(state["layout"]))
        if self._packing is None or packing.config != self._packing.config or self.num_envs != num_envs:
            self.num_envs = num_envs
            self._take(packing, slots)
        filled, next_slot = int(state["filled"]), int(state["next_slot"])
        if not (0 < filled <= slots > next_slot >= 0):
            raise ValueError(f"the state is damaged: {filled} of {slots} slots are filled, the next is {next_slot}")
        self._blocks.fill("blocks", state["blocks"], filled * num_envs)
        self.filled = filled
        self.next_slot = next_slot
        self._valid = self._find_valid()

    def _find_valid(self) -> Drawable:
        """Return the rows that can be sampled, from the oldest to the newest."""
        rows, drawable = self.slots * self.num_envs, Drawable(self.slots * self.num_envs, self.device)
        oldest = self._oldest
        index_R = (torch.arange(self.filled * self.num_envs, device=self.device) + oldest * self.num_envs) % rows
        drawable_SN = torch.cat((self._drawable(oldest, self.filled - oldest), self._drawable(0, oldest)))
        drawable.replace(index_R, drawable_SN.flatten(), 0)
        return drawable
