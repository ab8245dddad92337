"""Observations of any structure as one vector.

Shapes: N environments, F features.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces
from torch import Tensor

from rein.envs.wrappers.forwarding import Forwarding
from rein.networks.flatten import Flatten
from rein.protocols import Environment
from rein.types import TimeStep, Tree


class FlattenObservation(Forwarding):
    """Makes every observation a float32 vector (F,): what `gymnasium.spaces.flatten` makes of it, N at once.

    Numbers are laid out one after the other, each Discrete and each place of a MultiDiscrete as a one-hot vector, and
    the parts of a Dict or Tuple in its order.
    """

    def __init__(self, inner: Environment) -> None:
        self.inner = inner
        flat: Any = spaces.flatten_space(inner.single_observation_space)
        self._space = spaces.Box(flat.low.astype(np.float32), flat.high.astype(np.float32), dtype=np.float32)
        self._flat = Flatten(inner.single_observation_space, inner.device)

    @property
    def single_observation_space(self) -> spaces.Box:
        """A Box of F float32 numbers."""
        return self._space

    @property
    def config(self) -> dict[str, Any]:
        """What it was built with, as JSON."""
        return self._config()

    def _begin(self, observation: Tree, mask: Tensor | None) -> Tensor:
        return self._flat(observation)

    def _step(self, action: Tree, mask: Tensor | None) -> TimeStep:
        time_step = self._step_inner(action, mask)
        final_NF = self._flat(time_step.final_observation)
        same = time_step.observation is time_step.final_observation
        observation_NF = final_NF if same else self._flat(time_step.observation)
        return time_step._replace(observation=observation_NF, final_observation=final_NF)
