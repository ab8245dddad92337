"""The returns of episodes, for what adapts to them.

Shapes: N environments, E episodes that ended.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rein.types import Transition


class EpisodeReturns:
    """Sums of rewards over the episodes of N environments."""

    def __init__(self) -> None:
        self._sum_N: Tensor | None = None

    def add(self, transition: Transition) -> Tensor:
        """Take in one step; the returns (E,) of the episodes that ended in it."""
        if self._sum_N is None:
            self._sum_N = torch.zeros_like(transition.reward, dtype=torch.float64)
        self._sum_N += torch.where(transition.valid, transition.reward, 0.0)
        ended_N = (transition.terminated | transition.truncated) & transition.valid
        return_E = self._sum_N[ended_N]
        self._sum_N.masked_fill_(ended_N, 0.0)
        return return_E

    def observe_reset(self, mask_N: Tensor) -> None:
        """The episodes of these environments were left, and count for nothing."""
        if self._sum_N is not None:
            self._sum_N.masked_fill_(mask_N, 0.0)

    def state_dict(self) -> dict[str, Any]:
        """The sums of the episodes that go on."""
        return {"sum": self._sum_N}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave."""
        self._sum_N = None if state["sum"] is None else state["sum"].clone()
