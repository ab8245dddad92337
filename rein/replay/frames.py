"""Replay buffer that stores each frame of stacked observations once.

Shapes: N environments, B rows, k frames of a stack.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rein.ops.trees import checked_device
from rein.replay.prioritized import PrioritizedReplay
from rein.replay.replay import Replay
from rein.replay.storage import Blocks, Packing, allocate
from rein.types import Transition, Tree

_LEAST = 16  # stacks that there is memory for, once there is one
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # types of as many bytes


class Frames:
    """The observations of the last `slots` steps of N environments, and what came after each, as stacks (L, *F).

    A stack that is the one before it, moved on by a frame, is kept as that frame; so is one that is a single frame
    L times, as at an episode's beginning. What is compared is what stands in them, so nothing is ever told where
    episodes begin. Any other stack is kept whole, and so is what came after the last step of an episode: whatever was
    given comes back to the bit, and the memory that it takes is about that of one frame a step.

    Stack t is the observation of step t, and before that is known what came after step t - 1: of most steps the same.
    """

    def __init__(
        self,
        slots: int,
        num_envs: int,
        length: int,
        shape: Sequence[int],
        dtype: torch.dtype,
        *,
        storage: str = "memory",
        device: torch.device | str = "cpu",
    ) -> None:
        """`shape` is that of a frame. Raises MemoryError where the frames do not fit."""
        self.slots, self.num_envs, self.length = slots, num_envs, length
        self.shape, self.dtype, self.storage, self.device = tuple(shape), dtype, storage, checked_device(device)
        self.steps = 0  # that were appended
        self._stacks = slots + 1  # those of the steps, and what came after the newest
        self._rows = slots + length  # of which the oldest stack reaches back that far
        self._frames = self._memory(self._rows * num_envs, 1)[:, 0]
        self._blocks = Blocks(self._frames)
        where = {"dtype": torch.int64, "device": self.device}
        self._depth = torch.zeros(self._stacks, num_envs, **where)  # frames behind the newest one, up to L - 1
        self._id = torch.full((self._stacks, num_envs), -1, **where)  # of the stack, if it is kept whole
        self._next_id = torch.full((self._stacks, num_envs), -1, **where)  # of what came after, if not the next stack
        self._kept = self._memory(0, length)  # stack `id` is row id % K
        self._kept_blocks = Blocks(self._kept)
        self._ids = self._first = 0  # the next id, and the oldest that is in use
        self._first_of = torch.zeros(
            self._stacks, dtype=torch.int64, device="cpu"
        )  # the next id when a step was appended
        self._age_L = torch.arange(length - 1, -1, -1, device=self.device)
        self._every = torch.arange(num_envs, device=self.device)
        self._newest: tuple[Tensor, Tensor] | None = None  # what was appended last

    def _memory(self, rows: int, frames: int) -> Tensor:
        """(rows, frames, *F)."""
        size = frames * math.prod(self.shape) * self.dtype.itemsize
        taken = (
            allocate(rows, size, self.storage, self.device)
            if rows
            else torch.empty(0, size, dtype=torch.uint8, device="cpu")
        )
        return taken.to(self.device).view(self.dtype).view(rows, frames, *self.shape)

    @property
    def nbytes(self) -> int:
        """Memory taken, in bytes."""
        mine = (self._frames, self._kept, self._depth, self._id, self._next_id, self._first_of)
        return sum(tensor.nbytes for tensor in mine)

    def append(self, stack_NL: Tensor, next_NL: Tensor) -> None:
        """The observations of a step, and what came after them, (N, L, *F) each, never to be written to."""
        step, before = self.steps, self._before()
        self._first = int(self._first_of[(step + 1) % self._stacks])
        self._first_of[step % self._stacks] = self._ids
        if before is None:
            self._place(step, self._every, stack_NL, None)
        elif stack_NL is not before[1]:
            other_E = (~_equal(stack_NL, before[1])).nonzero().squeeze(1)
            if len(other_E):  # where episodes ended, most often
                stack_EL, before_EL, next_EL = (x.index_select(0, other_E) for x in (stack_NL, *before))
                self._next_id[(step - 1) % self._stacks, other_E] = self._keep(next_EL)
                self._place(step, other_E, stack_EL, before_EL)
        self._place(step + 1, self._every, next_NL, stack_NL)
        self.steps, self._newest = step + 1, (stack_NL, next_NL)

    def _before(self) -> tuple[Tensor, Tensor] | None:
        if self._newest is None and self.steps:  # it was loaded
            return self.both((self.steps - 1) % self.slots * self.num_envs + self._every)
        return self._newest

    def _place(self, number: int, env_E: Tensor, stack_EL: Tensor, before_EL: Tensor | None) -> None:
        """Have these as the stacks of that number, one of each of some environments; `before_EL` came before them."""
        now, previous = number % self._stacks, (number - 1) % self._stacks
        if before_EL is None:
            follows_E = torch.zeros_like(env_E, dtype=torch.bool)
        else:
            follows_E = _equal(stack_EL[:, :-1], before_EL[:, 1:])
        depth_E = torch.where(follows_E, (self._depth[previous, env_E] + 1).clamp(max=self.length - 1), 0)
        made_E = follows_E & ((self._id[previous, env_E] < 0) | (depth_E == self.length - 1))
        first = number % self._rows * self.num_envs
        with self._blocks.writing(first, first + self.num_envs):
            self._frames.index_copy_(0, first + env_E, stack_EL[:, -1])
        self._depth[now, env_E] = depth_E
        self._id[now, env_E] = self._next_id[now, env_E] = -1
        rest_E = (~made_E).nonzero().squeeze(1)
        if len(rest_E):
            rest_EL = stack_EL.index_select(0, rest_E)
            whole_E = (~_equal(rest_EL, rest_EL[:, -1:])).nonzero().squeeze(1)
            self._id[now, env_E[rest_E[whole_E]]] = self._keep(rest_EL.index_select(0, whole_E))

    def _keep(self, stack_EL: Tensor) -> Tensor:
        """The ids (E,) of stacks that are kept whole."""
        used, count = self._ids - self._first, len(stack_EL)
        if used + count > len(self._kept):
            larger = self._memory(max(2 * len(self._kept), used + count, _LEAST), self.length)
            id_K = torch.arange(self._first, self._ids, device=self.device)
            if used:
                larger.index_copy_(0, id_K % len(larger), self._kept.index_select(0, id_K % len(self._kept)))
            self._kept, self._kept_blocks = larger, Blocks(larger)
        id_E = torch.arange(self._ids, self._ids + count, device=self.device)
        if count:
            first = self._ids % len(self._kept)
            with self._kept_blocks.writing(first, first + count):
                self._kept.index_copy_(0, id_E % len(self._kept), stack_EL)
        self._ids += count
        return id_E

    def observation(self, row_B: Tensor) -> Tensor:
        """(B, L, *F) of these rows: row n of slot s is s * num_envs + n, and the newest step t is in slot t % slots."""
        step_B, env_B = self._step(row_B)
        return self._stack(step_B, env_B, self._id[step_B % self._stacks, env_B])

    def next_observation(self, row_B: Tensor) -> Tensor:
        """(B, L, *F), what came after them."""
        step_B, env_B = self._step(row_B)
        return self._stack(step_B + 1, env_B, self._id_of_next(step_B, env_B))

    def both(self, row_B: Tensor) -> tuple[Tensor, Tensor]:
        """The observations of these rows and what came after them, by one gather."""
        step_B, env_B = self._step(row_B)
        id_2B = torch.cat((self._id[step_B % self._stacks, env_B], self._id_of_next(step_B, env_B)))
        found = self._stack(torch.cat((step_B, step_B + 1)), env_B.repeat(2), id_2B)
        return found[: len(row_B)], found[len(row_B) :]

    def _step(self, row_B: Tensor) -> tuple[Tensor, Tensor]:
        """Of which step and which environment they are."""
        newest = self.steps - 1
        slot_B, env_B = row_B // self.num_envs, row_B % self.num_envs
        return newest - (newest - slot_B) % self.slots, env_B

    def _id_of_next(self, step_B: Tensor, env_B: Tensor) -> Tensor:
        id_B = self._next_id[step_B % self._stacks, env_B]
        return torch.where(id_B < 0, self._id[(step_B + 1) % self._stacks, env_B], id_B)

    def _stack(self, number_B: Tensor, env_B: Tensor, id_B: Tensor) -> Tensor:
        """(B, L, *F): the frames of a stack, or all of it where it is kept whole."""
        depth_B1 = self._depth[number_B % self._stacks, env_B].unsqueeze(1)
        frame_BL = (number_B.unsqueeze(1) - torch.minimum(self._age_L, depth_B1)) % self._rows
        row_BL = frame_BL * self.num_envs + env_B.unsqueeze(1)
        found = self._frames.index_select(0, row_BL.flatten()).unflatten(0, row_BL.shape)
        kept_E = (id_B >= 0).nonzero().squeeze(1)
        if len(kept_E):
            found.index_copy_(0, kept_E, self._kept.index_select(0, id_B[kept_E] % len(self._kept)))
        return found

    def state_dict(self) -> dict[str, Any]:
        """Everything; the frames in `Blocks`, the same until the ring comes round to them."""
        return {
            "steps": self.steps,
            "length": self.length,
            "shape": list(self.shape),
            "dtype": str(self.dtype).removeprefix("torch."),
            "frames": self._blocks.split(min(self.steps + 1, self._rows) * self.num_envs),
            "depth": self._depth,
            "id": self._id,
            "next_id": self._next_id,
            "first_of": self._first_of,
            "kept": self._kept_blocks.split(len(self._kept)),
            "ids": self._ids,
            "first": self._first,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave. Raises ValueError for that of other frames, or of other shapes."""
        mine = (self.length, list(self.shape), str(self.dtype).removeprefix("torch."))
        if (state["length"], [*state["shape"]], state["dtype"]) != mine:
            given = (state["length"], [*state["shape"]], state["dtype"])
            raise ValueError(f"the frames are (length, shape, dtype) {given} in the state, and {mine} here")
        steps, ids, first = int(state["steps"]), int(state["ids"]), int(state["first"])
        kept = sum(len(block) for block in state["kept"])
        if not 0 <= first <= ids <= first + kept:
            raise ValueError(f"the state has kept {kept} stacks of frames, for the ids from {first} to {ids}")
        self._kept = self._memory(kept, self.length)
        self._kept_blocks = Blocks(self._kept)
        self.steps, self._ids, self._first, self._newest = steps, ids, first, None
        self._blocks.fill("frames", state["frames"], min(steps + 1, self._rows) * self.num_envs)
        self._kept_blocks.fill("kept", state["kept"], kept)
        for name in ("depth", "id", "next_id", "first_of"):
            given, mine = state[name], getattr(self, f"_{name}")
            if given.shape != mine.shape or given.dtype != mine.dtype:
                raise ValueError(f"{name} of the frames is {tuple(given.shape)} in the state, {tuple(mine.shape)} here")
            mine.copy_(given)


def _equal(a_EL: Tensor, b_EL: Tensor) -> Tensor:
    """(E,) whether all that stands in a row is the same, to the bit."""
    if a_EL.is_floating_point():
        a_EL, b_EL = (x.view(_BITS[x.element_size()]) for x in (a_EL, b_EL))
    return (a_EL == b_EL).flatten(1).all(1)


_STACKED = ("observation", "next_observation")


class FrameReplay(Replay):
    """A `Replay` that samples what a `Replay` samples, of a 2L-th of its memory where observations stack L frames.

    A stack is put together when it is sampled: see `Frames`. `shape` is that of one observation, whose first axis is
    that of the stack if it has `frame_stack` entries, else the last one; the newest frame is the last entry.

    Mnih et al. 2015 keep frames like that.
    """

    def __init__(self, capacity: int, frame_stack: int, shape: Sequence[int], **options: Any) -> None:
        """`options` are those of `Replay`. Raises ValueError for a shape that is no stack of as many frames."""
        super().__init__(capacity, **options)
        self.frame_stack, self.shape = frame_stack, tuple(shape)
        self._axis = stack_axis(self.shape, frame_stack)
        self.frames: Frames | None = None  # until the first transition

    def append(self, transition: Transition, **more: Tree) -> None:
        """See `Replay.append`."""
        stacks = [self._as_stack(name, getattr(transition, name)) for name in _STACKED]
        super().append(transition._replace(observation={}, next_observation={}), **more)
        if self.frames is None:
            self.frames = self._make(stacks[0].dtype)
        self.frames.append(*stacks)

    def _as_stack(self, name: str, observation: Tree) -> Tensor:
        """(N, L, *F), or a ValueError that says what it is."""
        dtype = None if self.frames is None else self.frames.dtype
        if not isinstance(observation, Tensor):
            raise ValueError(f"frame_stack={self.frame_stack}: the {name} is a {type(observation).__name__}, no tensor")
        if tuple(observation.shape[1:]) != self.shape or observation.dtype != (dtype or observation.dtype):
            given = f"{tuple(observation.shape[1:])} {observation.dtype}"
            raise ValueError(f"the {name} of a row is {given}; it was {self.shape} {dtype or ''} before")
        observation = observation.to(self.device)
        return observation if self._axis == 1 else observation.movedim(self._axis, 1).contiguous()

    def _take(self, packing: Packing, slots: int) -> None:
        super()._take(packing, slots)
        self._like |= {name: {} for name in _STACKED}  # of which rows keep nothing

    def _make(self, dtype: torch.dtype) -> Frames:
        shape = self.shape[1:] if self._axis == 1 else self.shape[:-1]
        how = {"storage": self.storage, "device": self.device}
        return Frames(self.slots, self.num_envs, self.frame_stack, shape, dtype, **how)

    def _rows(self, index_B: Tensor, names: tuple[str, ...]) -> dict[str, Tree]:
        """See `Replay._rows`; the stacks by gathers of their own."""
        self.flush()  # the frames are further than rows that still wait
        others = tuple(name for name in names if name not in _STACKED)
        found = super()._rows(index_B, others) if others else {}
        if len(others) == len(names) or self.frames is None:
            return found
        if "next_observation" not in names:
            stacks = {"observation": self.frames.observation(index_B)}
        elif "observation" not in names:
            stacks = {"next_observation": self.frames.next_observation(index_B)}
        else:
            stacks = dict(zip(_STACKED, self.frames.both(index_B), strict=True))
        return found | {name: stack.movedim(1, self._axis) for name, stack in stacks.items()}

    def state_dict(self) -> dict[str, Any]:
        """The rows and the frames."""
        return {**super().state_dict(), "frames": None if self.frames is None else self.frames.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave. Raises ValueError for that of another capacity, or of other frames."""
        frames = state["frames"]
        super().load_state_dict(state)
        if frames is None:
            self.frames = None
            return
        dtype = getattr(torch, frames["dtype"], None)
        if not isinstance(dtype, torch.dtype) or self.filled != min(int(frames["steps"]), self.slots):
            what = f"{frames['steps']} steps of {frames['dtype']}"
            raise ValueError(f"the frames are those of {what} in the state, whose rows are {self.filled} slots")
        self.frames = self._make(dtype)
        self.frames.load_state_dict(frames)


class PrioritizedFrameReplay(FrameReplay, PrioritizedReplay):
    """A `FrameReplay` whose rows are drawn as those of a `PrioritizedReplay` are."""


def stack_axis(shape: Sequence[int], frame_stack: int) -> int:
    """The axis of the stack in observations (N, *shape): 1, or the last one. Raises ValueError where there is none."""
    if frame_stack < 1:
        raise ValueError(f"frame_stack={frame_stack}: give 1 or more frames")
    if shape and shape[0] == frame_stack:
        return 1
    if shape and shape[-1] == frame_stack:
        return len(shape)
    if not shape:
        raise ValueError(
            f"frame_stack={frame_stack}: observations that are a Dict, a Tuple or one number have no axis of a stack; "
            "give those of one Box, or leave it out"
        )
    raise ValueError(
        f"frame_stack={frame_stack}: neither the first nor the last axis of an observation of {tuple(shape)} has as "
        "many entries; give the length of the stack, or leave it out"
    )
