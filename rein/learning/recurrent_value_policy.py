"""Acting by the values of actions, and by what was seen of an episode so far.

Shapes: N environments, A actions, C numbers of a carry.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rein.learning.value_policy import Explore
from rein.networks.recurrent_q import RecurrentQNetwork
from rein.ops.random import own_state, restore_own
from rein.types import Tree


class RecurrentValuePolicy:
    """Acts by networks that it shares with an agent, under a carry and a generator of its own."""

    def __init__(
        self,
        networks: RecurrentQNetwork,
        first_action: int,
        explore: Explore,
        own_generator: torch.Generator | None,
        device: torch.device,
    ) -> None:
        """Without a generator it is greedy; with one it chooses as `explore` does by it."""
        self.device = device
        self._networks, self._first_action = networks, first_action
        self._explore, self._generator = explore, own_generator
        self._carry: Tensor | None = None

    @torch.no_grad()
    def select_action(self, observation: Tree) -> tuple[Tensor, dict[str, Tensor]]:
        """The action (N,) int64 for an observation (N, ...)."""
        x = self._networks.encoder(observation)
        if self._carry is None or len(self._carry) != len(x):
            self._carry = torch.zeros(len(x), self._networks.carry_size, dtype=torch.float32, device=self.device)
        value_NA, self._carry = self._networks.step(x, self._carry)
        if self._generator is None:
            return value_NA.argmax(1) + self._first_action, {}
        return self._explore(value_NA, self._generator) + self._first_action, {}

    def reset(self, mask: Tensor | None = None) -> None:
        """Forget what was seen of the environments in `mask` (N,), or of all."""
        if mask is None or self._carry is None:
            self._carry = None
        else:
            self._carry = self._carry.masked_fill(mask.unsqueeze(1), 0.0)

    def state_dict(self) -> dict[str, Any]:
        """Its own generator and carry; the networks are the agent's."""
        return {"generator": own_state(self._generator), "carry": self._carry}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave. Raises ValueError for the state of the other kind of policy."""
        restore_own(self._generator, state["generator"])
        self._carry = None if state["carry"] is None else state["carry"].to(self.device, copy=True)
