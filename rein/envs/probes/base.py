"""Base class of the probes, and actions that are a choice.

Shapes: N environments, K choices.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from gymnasium import spaces
from torch import Tensor

from rein.envs.base.simulation import SimulatedEnvironment


class Probe(SimulatedEnvironment):
    """N environments whose best return is known."""

    @property
    @abstractmethod
    def optimal_return(self) -> float:
        """The sum of rewards that the best policy expects of an episode."""


def choices(count: int, continuous: bool) -> spaces.Space[Any]:
    """The space of a choice among `count`: Discrete, or the interval [-1, 1] cut into as many equal parts."""
    return spaces.Box(-1.0, 1.0, (1,)) if continuous else spaces.Discrete(count)


def chosen(action: Tensor, count: int) -> Tensor:
    """(N,) int64: which of `count` an action chooses; an action of either kind, (N,) integers or (N, 1) in [-1, 1]."""
    if not action.is_floating_point():
        return action
    return ((action[:, 0] + 1.0) * (0.5 * count)).long().clamp_(0, count - 1)


def one_hot(index_N: Tensor, count: int) -> Tensor:
    """(K, N) float32: 1 where the row is the whole part of `index_N`, a float or an integer; 0 elsewhere."""
    return (index_N.long() == torch.arange(count, device=index_N.device)[:, None]).to(torch.float32)
