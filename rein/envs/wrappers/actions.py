"""Wrappers that change actions."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from rein.envs.wrappers.base import Wrapper
from rein.networks.heads import width
from rein.protocols import Environment
from rein.types import TimeStep


def action_bounds(wrapper: str, environment: Environment) -> tuple[spaces.Box, Tensor, Tensor]:
    """The environment's action space with its least and greatest action (*A).

    Raises TypeError for a space that is no Box of floating-point numbers.
    """
    space: spaces.Space[Any] = environment.single_action_space
    if not isinstance(space, spaces.Box) or not np.issubdtype(space.dtype, np.floating):
        raise TypeError(f"{wrapper}: actions in {space}; they must be a Box of floating-point numbers")
    low, high = (
        torch.tensor(bound, dtype=torch.float32, device=environment.device) for bound in (space.low, space.high)
    )
    return space, low, high


class ClipAction(Wrapper):
    """Takes any action and hands on the nearest one that the inner environment's Box holds.

    What the agent did is recorded, not what it was clipped to. Raises TypeError unless actions are a Box of
    floating-point numbers.
    """

    def __init__(self, inner: Environment) -> None:
        space, self._low, self._high = action_bounds("ClipAction", inner)
        self.inner = inner
        self._space = spaces.Box(-np.inf, np.inf, space.shape, np.float32)

    @property
    def single_action_space(self) -> spaces.Box:
        """A Box of the inner one's shape without bounds."""
        return self._space

    @property
    def config(self) -> dict[str, Any]:
        """What it was built with, as JSON."""
        return self._config()

    def _step(self, action: Tensor, mask: Tensor | None) -> TimeStep:
        return self._step_inner(action.clamp(self._low, self._high), mask)


class RescaleAction(Wrapper):
    """Takes actions in [-1, 1] and hands on low + (action + 1) / 2 * (high - low), exactly low and high at the ends.

    Beyond the ends it goes on as a straight line: put `ClipAction` around it for an agent that goes there.
    Raises TypeError unless actions are a Box of floating-point numbers, ValueError unless it is bounded and high - low
    is finite in float32.
    """

    def __init__(self, inner: Environment) -> None:
        space, self._low, self._high = action_bounds("RescaleAction", inner)
        if not np.isfinite(width(space)).all():
            raise ValueError(f"RescaleAction: actions in {space}, which has no bounds to scale to, or too far ones")
        self.inner = inner
        self._space = spaces.Box(-1.0, 1.0, space.shape, np.float32)

    @property
    def single_action_space(self) -> spaces.Box:
        """A Box of the inner one's shape from -1 to 1."""
        return self._space

    @property
    def config(self) -> dict[str, Any]:
        """What it was built with, as JSON."""
        return self._config()

    def _step(self, action: Tensor, mask: Tensor | None) -> TimeStep:
        share = (action.to(self._low.dtype) + 1) / 2
        return self._step_inner(torch.lerp(self._low, self._high, share), mask)
