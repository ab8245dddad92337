"""Replays whose observations are stacks of the last frames, each frame kept once.

Shapes: B rows of a batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rein.buffers.frames import Frames
from rein.buffers.packing import Packing
from rein.buffers.prioritized import PrioritizedReplay
from rein.buffers.replay import Replay
from rein.types import Transition, Tree

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
