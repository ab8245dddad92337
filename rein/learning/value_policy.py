"""Acting by the values of actions, and nothing else.

Shapes: N environments, A actions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from rein.learning.options import fraction
from rein.networks.q_network import QNetwork
from rein.networks.quantile_network import QuantileNetwork
from rein.ops.exploration import epsilon_greedy
from rein.ops.random import own_state, restore_own
from rein.types import Tree

Explore = Callable[[Tensor, torch.Generator], Tensor]  # (values (N, A), generator) -> which of the actions (N,)


def exploring(agent: object, own: Explore, epsilon: float | None) -> Explore:
    """The agent's `own` way to explore, or, where an `epsilon` is given, epsilon-greedily by that.

    Raises ValueError for an epsilon that is not between 0 and 1.
    """
    if epsilon is None:
        return own
    probability = fraction(agent, "epsilon", epsilon)
    return lambda value_NA, drawing: epsilon_greedy(value_NA, probability, drawing)


class ValuePolicy:
    """Acts by networks that it shares with an agent: greedily, or as `explore` says, with a generator of its own."""

    def __init__(
        self,
        networks: QNetwork | QuantileNetwork,
        first_action: int,
        explore: Explore,
        own_generator: torch.Generator | None,
        device: torch.device,
    ) -> None:
        self.device = device
        self._networks, self._first_action = networks, first_action
        self._explore, self._generator = explore, own_generator

    @torch.no_grad()
    def select_action(self, observation: Tree) -> tuple[Tensor, dict[str, Tensor]]:
        """The action (N,) int64 for an observation (N, ...)."""
        value_NA = self._networks(self._networks.encoder(observation))
        if self._generator is None:
            return value_NA.argmax(1) + self._first_action, {}
        return self._explore(value_NA, self._generator) + self._first_action, {}

    def reset(self, mask: Tensor | None = None) -> None:
        """Nothing to forget: an action depends on the observation alone."""

    def state_dict(self) -> dict[str, Any]:
        """Its own generator; the networks are the agent's."""
        return {"generator": own_state(self._generator)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave. Raises ValueError for the state of the other kind of policy."""
        restore_own(self._generator, state["generator"])
