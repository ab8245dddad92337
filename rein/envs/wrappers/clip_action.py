"""Actions of any size, clipped to the environment's bounds."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces
from torch import Tensor

from rein.envs.wrappers.bounds import action_bounds
from rein.envs.wrappers.forwarding import Forwarding
from rein.protocols import Environment
from rein.types import TimeStep


class ClipAction(Forwarding):
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
