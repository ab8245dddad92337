"""Actions between -1 and 1, whatever the environment's own bounds are."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from rein.envs.wrappers.bounds import action_bounds
from rein.envs.wrappers.forwarding import Forwarding
from rein.networks.bounds import width
from rein.protocols import Environment
from rein.types import TimeStep


class RescaleAction(Forwarding):
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
