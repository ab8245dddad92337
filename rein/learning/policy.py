"""Acting by networks, and nothing else.

Shapes: N environments, C numbers of a carry.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rein.networks.actor_critic import ActorCritic
from rein.networks.discrete import DiscreteNetworks
from rein.ops.random import own_state, restore_own


def share_parameters(before: nn.Module, after: nn.Module) -> None:
    """Make `before` use the parameters and buffers of `after`: policies built on `before` act by the new values.

    Raises ValueError where they are not as many.
    """
    for old, new in ((before.parameters(), after.parameters()), (before.buffers(), after.buffers())):
        for mine, theirs in zip(old, new, strict=True):
            mine.data = theirs.data


class NetworkPolicy:
    """Acts by networks that it shares with an agent, under a carry and a generator of its own.

    The statistics of the encoder are the agent's too, as they are at any time; acting never changes them.
    """

    def __init__(
        self,
        networks: ActorCritic | DiscreteNetworks,
        own_generator: torch.Generator | None,
        device: torch.device,
    ) -> None:
        self.device = device
        self._networks, self._generator = networks, own_generator
        self._carry: Tensor | None = None

    def select_action(self, observation: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """The action (N, ...) for an observation (N, ...)."""
        with torch.no_grad():
            x = self._networks.encoder(observation)
            if self._networks.carry_size and (self._carry is None or len(self._carry) != len(x)):
                self._carry = x.new_zeros((len(x), self._networks.carry_size), dtype=torch.float32)
            distribution, self._carry = self._networks.policy(x, self._carry)
            sample = distribution.mode() if self._generator is None else distribution.sample(self._generator)
            return self._networks.policy_head.to_action(distribution, sample), {}

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
