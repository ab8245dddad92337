"""Wrappers that change actions."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from rein.envs.wrappers.wrapper import Wrapper
from rein.networks.heads import width
from rein.protocols import Environment
from rein.types import TimeStep


def action_bounds(wrapper: str, environment: Environment) -> tuple[spaces.Box, Tensor, Tensor]:
    """Return the action space of an environment and its bounds `low` and `high` `(*A)`.

    Raises TypeError if the space is not a Box of floating-point numbers.
    """
    space: spaces.Space[Any] = environment.single_action_space
    if not isinstance(space, spaces.Box) or not np.issubdtype(space.dtype, np.floating):
        raise TypeError(f"{wrapper}: actions in {space}; they must be a Box of floating-point numbers")
    low, high = (
        torch.tensor(bound, dtype=torch.float32, device=environment.device) for bound in (space.low, space.high)
    )
    return space, low, high


class ClipAction(Wrapper):
    """Clip actions to the bounds of the inner environment.

    Stores record the action of the agent before clipping. Raises TypeError unless actions are a Box of floating-point
    numbers.
    """

    def __init__(self, inner: Environment) -> None:
        space, self._low, self._high = action_bounds("ClipAction", inner)
        self.inner = inner
        self._space = spaces.Box(-np.inf, np.inf, space.shape, np.float32)

    @property
    def single_action_space(self) -> spaces.Box:
        """Box of the inner shape without bounds."""
        return self._space

    def _step(self, action: Tensor, mask: Tensor | None) -> TimeStep:
        return self._step_inner(action.clamp(self._low, self._high), mask)


class RescaleAction(Wrapper):
    """Rescale actions from [-1, 1] to the bounds of the inner environment: low + (action + 1) / 2 * (high - low).

    Actions -1 and 1 give exactly `low` and `high`. Actions outside of [-1, 1] are not clipped; wrap the result in
    `ClipAction` if the agent can produce them.

    Raises TypeError unless actions are a Box of floating-point numbers, and ValueError unless the Box is bounded and
    high - low is finite in float32.
    """

    def __init__(self, inner: Environment) -> None:
        space, self._low, self._high = action_bounds("RescaleAction", inner)
        if not np.isfinite(width(space)).all():
            raise ValueError(f"RescaleAction: actions in {space} have no bounds, or bounds too far apart for float32")
        self.inner = inner
        self._space = spaces.Box(-1.0, 1.0, space.shape, np.float32)

    @property
    def single_action_space(self) -> spaces.Box:
        """Box of the inner shape from -1 to 1."""
        return self._space

    def _step(self, action: Tensor, mask: Tensor | None) -> TimeStep:
        share = (action.to(self._low.dtype) + 1) / 2
        return self._step_inner(torch.lerp(self._low, self._high, share), mask)
