"""Base class of the probes, and functions for discrete choices.

Shapes: N environments, K choices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor

from rein.envs.base.simulation import SimulatedEnvironment


class Probe(SimulatedEnvironment):
    """N environments with a known optimal return."""

    optimal_return: float  # expected return of an episode under the best policy, undiscounted
    initial_range: Sequence[tuple[float, float]] = ((0.0, 0.0),)


class OneStepProbe(Probe):
    """Probe with episodes of one step, in which the best action has reward 1 from every state."""

    optimal_return = 1.0

    def optimal_value(self, observation: Tensor, gamma: float) -> Tensor:
        """Return v(s) = 1, shape (N,)."""
        return torch.ones_like(observation[:, 0])


def choices(count: int, continuous: bool) -> spaces.Space[Any]:
    """Return the action space of a choice among `count`: Discrete, or [-1, 1] divided into `count` equal intervals."""
    return spaces.Box(-1.0, 1.0, (1,)) if continuous else spaces.Discrete(count)


def chosen(action: Tensor, count: int) -> Tensor:
    """Return the choices (N,) int64 of discrete actions (N,) or continuous actions (N, 1) in [-1, 1]."""
    if not action.is_floating_point():
        return action
    return ((action[:, 0] + 1.0) * (0.5 * count)).long().clamp_(0, count - 1)


def one_hot(index_N: Tensor, count: int) -> Tensor:
    """Return the one-hot vectors (K, N) float32 of the integer parts of `index_N`; zeros for an index out of range."""
    return (index_N.long() == torch.arange(count, device=index_N.device)[:, None]).to(torch.float32)
