"""Wrappers that change observations.

Shapes: N environments, k stacked observations.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from rein.envs.base.contract import restored, where_rows
from rein.envs.wrappers.wrapper import Wrapper, may_hold, where_inside
from rein.networks.encoder import Flatten
from rein.ops.trees import map_tree
from rein.protocols import Environment
from rein.spaces import RESERVED, map_space, visible, visible_space
from rein.spaces.conversion import layout, tensor_dtype
from rein.types import TimeStep, Tree


class FlattenObservation(Wrapper):
    """Flatten observations to float32 vectors (F,), as `gymnasium.spaces.flatten` does.

    Each Discrete and each entry of a MultiDiscrete becomes a one-hot vector. The parts of a Dict or Tuple are
    concatenated in order. The entries `action_mask` and `critic_observation` stay as they are, and the vector is then
    the entry `observation`.
    """

    def __init__(self, inner: Environment) -> None:
        self.inner = inner
        space = visible_space(inner.single_observation_space)
        flat: Any = spaces.flatten_space(space)
        flat = spaces.Box(flat.low.astype(np.float32), flat.high.astype(np.float32), dtype=np.float32)
        reserved = _reserved(inner.single_observation_space)
        self._space = spaces.Dict({"observation": flat, **reserved}) if reserved else flat
        self._flatten = Flatten(space, inner.device)

    @property
    def single_observation_space(self) -> spaces.Space[Any]:
        """Box (F,) float32, or a Dict with it and the reserved entries."""
        return self._space

    def _begin(self, observation: Tree, mask: Tensor | None) -> Tree:
        return self._flat(observation)

    def _flat(self, observation: Tree) -> Tree:
        flat_NF, reserved = self._flatten(visible(observation)), _reserved(observation)
        return {"observation": flat_NF, **reserved} if reserved else flat_NF

    def _step(self, action: Tree, mask: Tensor | None) -> TimeStep:
        time_step = self._step_inner(action, mask)
        final_observation = self._flat(time_step.final_observation)
        same = time_step.observation is time_step.final_observation
        observation = final_observation if same else self._flat(time_step.observation)
        return time_step._replace(observation=observation, final_observation=final_observation)


class FrameStack(Wrapper):
    """Stack the last `length` observations, oldest first, along a new first axis: `(L, *O)`.

    A stack contains observations of one episode only. At the start of an episode it is the first observation `length`
    times. `final_observation` is the stack after the last step. Each observation is kept in memory once. The entries
    `action_mask` and `critic_observation` are not stacked. Raises ValueError for a length below 1.
    """

    def __init__(self, inner: Environment, length: int = 4) -> None:
        if length < 1:
            raise ValueError(f"FrameStack(length={length}): give 1 or more")
        self.inner = inner
        self.length = length
        reserved = _reserved(inner.single_observation_space)
        space = _stacked_part(inner.single_observation_space)
        self._space = stacked_space(space, length)
        if reserved:
            self._space = spaces.Dict({**self._space.spaces, **reserved})  # type: ignore[attr-defined]  # a Dict
        self._frames = [_zeros(space, inner.num_envs, inner.device)] * length

    @property
    def single_observation_space(self) -> spaces.Space[Any]:
        """Inner space with `length` in front of each shape."""
        return self._space

    @where_inside
    def state_dict(self) -> dict[str, Any]:
        """Return the state of the inner environment, and the stack."""
        return {"inner": self.inner.state_dict(), "stack": self._stack()}

    @where_inside
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of `state_dict`. Raises ValueError for another length, shape or number of environments."""
        stack = _restored(state["stack"], self._stack(), "stack")
        self.inner.load_state_dict(state["inner"])
        self._frames = [map_tree(lambda x, k=k: x[:, k], stack) for k in range(self.length)]

    def _begin(self, observation: Tree, mask: Tensor | None) -> Tree:
        if mask is None:
            self._frames = [_stacked_part(observation)] * self.length
        else:
            self._restart(mask, observation)
        return _with_reserved(self._stack(), observation)

    def _step(self, action: Tree, mask: Tensor | None) -> TimeStep:
        time_step = self._step_inner(action, mask)
        frames = [*self._frames[1:], _stacked_part(time_step.final_observation)]
        ended_N = time_step.terminated | time_step.truncated
        began_N = ended_N | ~time_step.valid  # an invalid row that was stepped is a reset
        if mask is not None:
            began_N = began_N & mask
            frames = [where_rows(mask, new, old) for new, old in zip(frames, self._frames, strict=True)]
        self._frames = frames
        stack = self._stack()
        if not may_hold(began_N):
            stack = _with_reserved(stack, time_step.final_observation)
            return time_step._replace(observation=stack, final_observation=stack)
        self._restart(began_N, time_step.observation)
        observation = self._stack()
        final_observation = _with_reserved(where_rows(ended_N, stack, observation), time_step.final_observation)
        return time_step._replace(
            observation=_with_reserved(observation, time_step.observation), final_observation=final_observation
        )

    def _restart(self, began_N: Tensor, observation: Tree) -> None:
        first = _stacked_part(observation)
        self._frames = [where_rows(began_N, first, frame) for frame in self._frames]

    def _stack(self) -> Tree:
        return map_tree(lambda *frames: torch.stack(frames, 1), *self._frames)


def _reserved(tree: Any) -> dict[str, Any]:
    """Return the reserved entries of an observation or an observation space."""
    parts = tree.spaces if isinstance(tree, spaces.Dict) else tree
    return {name: parts[name] for name in sorted(RESERVED) if name in parts} if isinstance(parts, Mapping) else {}


def _stacked_part(tree: Any) -> Any:
    """Return an observation or an observation space without its reserved entries."""
    if not _reserved(tree):
        return tree
    parts = tree.spaces if isinstance(tree, spaces.Dict) else tree
    others = {name: part for name, part in parts.items() if name not in RESERVED}
    return spaces.Dict(others) if isinstance(tree, spaces.Dict) else others


def _with_reserved(stack: Tree, observation: Tree) -> Tree:
    return {**stack, **_reserved(observation)} if _reserved(observation) else stack


def stacked_space(space: spaces.Space[Any], length: int) -> spaces.Space[Any]:
    """Return the space of `length` values of `space`, stacked along a new first axis."""
    if isinstance(space, spaces.Dict):
        return spaces.Dict({key: stacked_space(child, length) for key, child in space.spaces.items()})
    if isinstance(space, spaces.Tuple):
        return spaces.Tuple([stacked_space(child, length) for child in space.spaces])
    if isinstance(space, spaces.Box):
        low, high = (np.stack([bound] * length) for bound in (space.low, space.high))
        return spaces.Box(low, high, dtype=space.dtype)
    if isinstance(space, spaces.Discrete):
        return spaces.MultiDiscrete([space.n] * length, start=[space.start] * length)
    if isinstance(space, spaces.MultiDiscrete):
        return spaces.MultiDiscrete(np.stack([space.nvec] * length), start=np.stack([space.start] * length))
    if isinstance(space, spaces.MultiBinary):
        return spaces.MultiBinary((length, *space.shape))
    raise TypeError(f"FrameStack: values of {space} cannot be converted to tensors")


def _zeros(space: spaces.Space[Any], rows: int, device: torch.device) -> Tree:
    def zeros(part: spaces.Space[Any]) -> Tensor:
        return torch.zeros((rows, *layout(part)[0]), dtype=tensor_dtype(part), device=device)

    return map_space(zeros, space)


def _restored(saved: Tree, like: Tree, name: str) -> Tree:
    if isinstance(like, Mapping):
        return {key: _restored(saved[key], part, key) for key, part in like.items()}
    return restored({name: saved}, name, like)


def observation_history(environment: Environment, length: int) -> FrameStack:
    """Wrap an environment so that observations are windows (L, F) float32 of the last `length` flattened observations.

    The oldest observation is first. At the start of an episode the window is the first observation `length` times. An
    agent records the window that ends in s_t, a_t, r_t and the window that ends in s_t+1. The result is a `FrameStack`
    around `FlattenObservation`.
    """
    return FrameStack(FlattenObservation(environment), length)
