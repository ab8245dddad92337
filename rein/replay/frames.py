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

_LEAST = 16  # smallest number of whole stacks to allocate
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # integer types by size in bytes


class Frames:
    """Stacks `(L, *F)` of the last `slots` steps of N environments: observations and next observations.

    Only the newest frame of a stack is stored if the stack is the previous one shifted by one frame, or one frame
    repeated L times, as at the start of an episode. Stacks are compared by value, so episode boundaries need not be
    passed. Any other stack is stored whole, and so is the next observation of the last step of an episode. Stacks are
    returned bit for bit, and take about the memory of one frame per step.

    Stack t is the observation of step t. Until step t is appended, it is the next observation of step t - 1.
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
        """`shape` is the shape of one frame. Raises MemoryError if the frames do not fit."""
        self.slots = slots
        self.num_envs = num_envs
        self.length = length
        self.shape = tuple(shape)
        self.dtype = dtype
        self.storage = storage
        self.device = checked_device(device)
        self.steps = 0  # number of appended steps
        self._stacks = slots + 1  # one per step, and the next observation of the newest step
        self._rows = slots + length  # the oldest stack reaches `length` frames back
        self._frames = self._memory(self._rows * num_envs, 1)[:, 0]
        self._blocks = Blocks(self._frames)
        options = {"dtype": torch.int64, "device": self.device}
        self._depth = torch.zeros(self._stacks, num_envs, **options)  # distinct frames before the newest, up to L - 1
        self._id = torch.full((self._stacks, num_envs), -1, **options)  # id of a stack that is stored whole, else -1
        self._next_id = torch.full((self._stacks, num_envs), -1, **options)  # same for the next observation
        self._whole = self._memory(0, length)  # stack `id` is row id % K
        self._whole_blocks = Blocks(self._whole)
        self._ids = self._first = 0  # the next id, and the oldest one in use
        self._first_of = torch.zeros(
            self._stacks, dtype=torch.int64, device="cpu"
        )  # the next id at the time when a step was appended
        self._age_L = torch.arange(length - 1, -1, -1, device=self.device)
        self._every = torch.arange(num_envs, device=self.device)
        self._newest: tuple[Tensor, Tensor] | None = None  # arguments of the last `append`

    def _memory(self, rows: int, frames: int) -> Tensor:
        """Allocate `(rows, frames, *F)`."""
        size = frames * math.prod(self.shape) * self.dtype.itemsize
        allocated = (
            allocate(rows, size, self.storage, self.device)
            if rows
            else torch.empty(0, size, dtype=torch.uint8, device="cpu")
        )
        return allocated.to(self.device).view(self.dtype).view(rows, frames, *self.shape)

    @property
    def nbytes(self) -> int:
        """Memory in bytes."""
        tensors = (self._frames, self._whole, self._depth, self._id, self._next_id, self._first_of)
        return sum(tensor.nbytes for tensor in tensors)

    def append(self, stack_NL: Tensor, next_NL: Tensor) -> None:
        """Append observations and next observations of one step, each `(N, L, *F)`. Do not write to them afterwards."""
        step, before = self.steps, self._before()
        self._first = int(self._first_of[(step + 1) % self._stacks])
        self._first_of[step % self._stacks] = self._ids
        if before is None:
            self._place(step, self._every, stack_NL, None)
        elif stack_NL is not before[1]:
            other_E = (~_equal(stack_NL, before[1])).nonzero().squeeze(1)
            if len(other_E):  # usually because an episode ended
                stack_EL, before_EL, next_EL = (x.index_select(0, other_E) for x in (stack_NL, *before))
                self._next_id[(step - 1) % self._stacks, other_E] = self._keep(next_EL)
                self._place(step, other_E, stack_EL, before_EL)
        self._place(step + 1, self._every, next_NL, stack_NL)
        self.steps = step + 1
        self._newest = (stack_NL, next_NL)

    def _before(self) -> tuple[Tensor, Tensor] | None:
        if self._newest is None and self.steps:  # after load_state_dict
            return self.both((self.steps - 1) % self.slots * self.num_envs + self._every)
        return self._newest

    def _place(self, number: int, env_E: Tensor, stack_EL: Tensor, before_EL: Tensor | None) -> None:
        """Store stack `number` of some environments. `before_EL` are their previous stacks."""
        now, previous = number % self._stacks, (number - 1) % self._stacks
        if before_EL is None:
            follows_E = torch.zeros_like(env_E, dtype=torch.bool)
        else:
            follows_E = _equal(stack_EL[:, :-1], before_EL[:, 1:])
        depth_E = torch.where(follows_E, (self._depth[previous, env_E] + 1).clamp(max=self.length - 1), 0)
        shifted_E = follows_E & ((self._id[previous, env_E] < 0) | (depth_E == self.length - 1))
        first = number % self._rows * self.num_envs
        with self._blocks.writing(first, first + self.num_envs):
            self._frames.index_copy_(0, first + env_E, stack_EL[:, -1])
        self._depth[now, env_E] = depth_E
        self._id[now, env_E] = self._next_id[now, env_E] = -1
        rest_E = (~shifted_E).nonzero().squeeze(1)
        if len(rest_E):
            rest_EL = stack_EL.index_select(0, rest_E)
            whole_E = (~_equal(rest_EL, rest_EL[:, -1:])).nonzero().squeeze(1)
            self._id[now, env_E[rest_E[whole_E]]] = self._keep(rest_EL.index_select(0, whole_E))

    def _keep(self, stack_EL: Tensor) -> Tensor:
        """Store whole stacks and return their ids (E,)."""
        used, count = self._ids - self._first, len(stack_EL)
        if used + count > len(self._whole):
            larger = self._memory(max(2 * len(self._whole), used + count, _LEAST), self.length)
            id_K = torch.arange(self._first, self._ids, device=self.device)
            if used:
                larger.index_copy_(0, id_K % len(larger), self._whole.index_select(0, id_K % len(self._whole)))
            self._whole = larger
            self._whole_blocks = Blocks(larger)
        id_E = torch.arange(self._ids, self._ids + count, device=self.device)
        if count:
            first = self._ids % len(self._whole)
            with self._whole_blocks.writing(first, first + count):
                self._whole.index_copy_(0, id_E % len(self._whole), stack_EL)
        self._ids += count
        return id_E

    def observation(self, row_B: Tensor) -> Tensor:
        """Return the observations `(B, L, *F)` of rows.

        Environment n of slot s is row `s * num_envs + n`. Step t is in slot `t % slots`.
        """
        step_B, env_B = self._step(row_B)
        return self._stack(step_B, env_B, self._id[step_B % self._stacks, env_B])

    def next_observation(self, row_B: Tensor) -> Tensor:
        """Return the next observations `(B, L, *F)` of rows."""
        step_B, env_B = self._step(row_B)
        return self._stack(step_B + 1, env_B, self._id_of_next(step_B, env_B))

    def both(self, row_B: Tensor) -> tuple[Tensor, Tensor]:
        """Return the observations and the next observations of rows, with one gather."""
        step_B, env_B = self._step(row_B)
        id_2B = torch.cat((self._id[step_B % self._stacks, env_B], self._id_of_next(step_B, env_B)))
        stacks = self._stack(torch.cat((step_B, step_B + 1)), env_B.repeat(2), id_2B)
        return stacks[: len(row_B)], stacks[len(row_B) :]

    def _step(self, row_B: Tensor) -> tuple[Tensor, Tensor]:
        """Return the step and the environment of each row."""
        newest = self.steps - 1
        slot_B, env_B = row_B // self.num_envs, row_B % self.num_envs
        return newest - (newest - slot_B) % self.slots, env_B

    def _id_of_next(self, step_B: Tensor, env_B: Tensor) -> Tensor:
        id_B = self._next_id[step_B % self._stacks, env_B]
        return torch.where(id_B < 0, self._id[(step_B + 1) % self._stacks, env_B], id_B)

    def _stack(self, number_B: Tensor, env_B: Tensor, id_B: Tensor) -> Tensor:
        """Return stacks `(B, L, *F)`, assembled from frames or read whole."""
        depth_B1 = self._depth[number_B % self._stacks, env_B].unsqueeze(1)
        frame_BL = (number_B.unsqueeze(1) - torch.minimum(self._age_L, depth_B1)) % self._rows
        row_BL = frame_BL * self.num_envs + env_B.unsqueeze(1)
        stacks = self._frames.index_select(0, row_BL.flatten()).unflatten(0, row_BL.shape)
        whole_E = (id_B >= 0).nonzero().squeeze(1)
        if len(whole_E):
            stacks.index_copy_(0, whole_E, self._whole.index_select(0, id_B[whole_E] % len(self._whole)))
        return stacks

    def state_dict(self) -> dict[str, Any]:
        """Return the state. The frames are in blocks, which stay the same until the ring overwrites them."""
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
            "kept": self._whole_blocks.split(len(self._whole)),
            "ids": self._ids,
            "first": self._first,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned. Raises ValueError if length, shape or dtype of the frames differ."""
        expected = (self.length, list(self.shape), str(self.dtype).removeprefix("torch."))
        if (state["length"], [*state["shape"]], state["dtype"]) != expected:
            saved = (state["length"], [*state["shape"]], state["dtype"])
            raise ValueError(f"the state has frames of (length, shape, dtype) {saved}, not {expected}")
        steps, ids, first = int(state["steps"]), int(state["ids"]), int(state["first"])
        whole = sum(len(block) for block in state["kept"])
        if not 0 <= first <= ids <= first + whole:
            raise ValueError(f"the state has {whole} whole stacks, but ids from {first} to {ids}")
        self._whole = self._memory(whole, self.length)
        self._whole_blocks = Blocks(self._whole)
        self.steps = steps
        self._ids = ids
        self._first = first
        self._newest = None
        self._blocks.fill("frames", state["frames"], min(steps + 1, self._rows) * self.num_envs)
        self._whole_blocks.fill("kept", state["kept"], whole)
        for name in ("depth", "id", "next_id", "first_of"):
            loaded, current = state[name], getattr(self, f"_{name}")
            if loaded.shape != current.shape or loaded.dtype != current.dtype:
                shapes = f"{tuple(loaded.shape)}, not {tuple(current.shape)}"
                raise ValueError(f"the state has {name} of frames of the shape {shapes}")
            current.copy_(loaded)


def _equal(a_EL: Tensor, b_EL: Tensor) -> Tensor:
    """Return (E,) bool: whether rows are equal to the bit."""
    if a_EL.is_floating_point():
        a_EL, b_EL = (x.view(_BITS[x.element_size()]) for x in (a_EL, b_EL))
    return (a_EL == b_EL).flatten(1).all(1)


_STACKED = ("observation", "next_observation")


class FrameReplay(Replay):
    """Replay buffer for observations that stack L frames. It needs 1 / 2L of the memory of `Replay`.

    Stacks are assembled when they are sampled, see `Frames`. `shape` is the shape of one observation. The axis of the
    stack is the first one if it has `frame_stack` entries, otherwise the last one. The newest frame is the last entry.

    Source: Mnih et al. 2015.
    """

    def __init__(self, capacity: int, frame_stack: int, shape: Sequence[int], **options: Any) -> None:
        """`options` are those of `Replay`. Raises ValueError if no end axis of `shape` has `frame_stack` entries."""
        super().__init__(capacity, **options)
        self.frame_stack = frame_stack
        self.shape = tuple(shape)
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
        """Return the observation as `(N, L, *F)`. Raises ValueError for another shape or dtype."""
        dtype = None if self.frames is None else self.frames.dtype
        if not isinstance(observation, Tensor):
            kind = type(observation).__name__
            raise ValueError(f"frame_stack={self.frame_stack}: the {name} is a {kind}, not a tensor")
        if tuple(observation.shape[1:]) != self.shape or observation.dtype != (dtype or observation.dtype):
            received = f"{tuple(observation.shape[1:])} {observation.dtype}"
            raise ValueError(f"the {name} of a row is {received}, not {self.shape} {dtype or ''} as before")
        observation = observation.to(self.device)
        return observation if self._axis == 1 else observation.movedim(self._axis, 1).contiguous()

    def _take(self, packing: Packing, slots: int) -> None:
        super()._take(packing, slots)
        self._like |= {name: {} for name in _STACKED}  # not stored in the rows

    def _make(self, dtype: torch.dtype) -> Frames:
        shape = self.shape[1:] if self._axis == 1 else self.shape[:-1]
        options = {"storage": self.storage, "device": self.device}
        return Frames(self.slots, self.num_envs, self.frame_stack, shape, dtype, **options)

    def _rows(self, index_B: Tensor, names: tuple[str, ...]) -> dict[str, Tree]:
        """See `Replay._rows`. Stacks are gathered from the frames."""
        self.flush()  # frames are written at once, rows only here
        others = tuple(name for name in names if name not in _STACKED)
        fields = super()._rows(index_B, others) if others else {}
        if len(others) == len(names) or self.frames is None:
            return fields
        if "next_observation" not in names:
            stacks = {"observation": self.frames.observation(index_B)}
        elif "observation" not in names:
            stacks = {"next_observation": self.frames.next_observation(index_B)}
        else:
            stacks = dict(zip(_STACKED, self.frames.both(index_B), strict=True))
        return fields | {name: stack.movedim(1, self._axis) for name, stack in stacks.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the rows and the frames."""
        return {**super().state_dict(), "frames": None if self.frames is None else self.frames.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned. Raises ValueError if the capacity or the frames differ."""
        frames = state["frames"] if state["filled"] else state.get("frames")  # a state without rows may have none
        super().load_state_dict(state)
        if frames is None:
            self.frames = None
            return
        dtype = getattr(torch, frames["dtype"], None)
        if not isinstance(dtype, torch.dtype) or self.filled != min(int(frames["steps"]), self.slots):
            steps = f"{frames['steps']} steps of {frames['dtype']}"
            raise ValueError(f"the state has frames of {steps}, but rows of {self.filled} slots")
        self.frames = self._make(dtype)
        self.frames.load_state_dict(frames)


class PrioritizedFrameReplay(FrameReplay, PrioritizedReplay):
    """`FrameReplay` with the sampling of `PrioritizedReplay`."""


def stack_axis(shape: Sequence[int], frame_stack: int) -> int:
    """Return the axis of the stack in observations `(N, *shape)`: 1, or the last one. Raises ValueError otherwise."""
    if frame_stack < 1:
        raise ValueError(f"frame_stack={frame_stack}: give 1 or more frames")
    if shape and shape[0] == frame_stack:
        return 1
    if shape and shape[-1] == frame_stack:
        return len(shape)
    if not shape:
        raise ValueError(
            f"frame_stack={frame_stack}: Dict, Tuple and scalar observations have no stack axis; use a Box observation "
            "space, or omit frame_stack"
        )
    raise ValueError(
        f"frame_stack={frame_stack}: neither the first nor the last axis of observations of shape {tuple(shape)} has "
        f"{frame_stack} entries; give the length of the stack, or omit frame_stack"
    )
