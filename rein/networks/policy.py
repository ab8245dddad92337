"""Acting by networks, and nothing else.

Shapes: N environments.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rein.networks.actor_critic import ActorCritic
from rein.networks.flatten import Flatten
from rein.ops.random import restore


class NetworkPolicy:
    """Acts by networks that it shares with an agent."""

    def __init__(
        self, networks: ActorCritic, flatten: Flatten, own_generator: torch.Generator | None, device: torch.device
    ) -> None:
        self.device = device
        self._networks, self._flatten, self._generator = networks, flatten, own_generator

    def select_action(self, observation: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """The action (N, ...) for an observation (N, ...)."""
        with torch.no_grad():
            distribution = self._networks.policy(self._flatten(observation))
            sample = distribution.mode() if self._generator is None else distribution.sample(self._generator)
            return self._networks.policy_head.to_action(distribution, sample), {}

    def reset(self, mask: Tensor | None = None) -> None:
        """Nothing to forget: an action depends on the observation alone."""

    def state_dict(self) -> dict[str, Any]:
        """Its own generator; the networks are the agent's."""
        return {"generator": None if self._generator is None else self._generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave."""
        if self._generator is not None:
            restore(self._generator, state["generator"])
