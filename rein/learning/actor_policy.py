"""Acting by an actor of continuous actions, and nothing else.

Shapes: N environments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from rein.networks.continuous import ContinuousNetworks
from rein.ops.random import own_state, restore_own
from rein.types import Tree


class ActorPolicy:
    """Acts by an actor that it shares with an agent; a stochastic one samples under a generator of the policy's own."""

    def __init__(
        self,
        networks: ContinuousNetworks,
        own_generator: torch.Generator | None,
        device: torch.device,
        noise: Callable[[], float] = float,
    ) -> None:
        """`noise` is the standard deviation of what is added, of actions between -1 and 1, where nothing else draws."""
        self.device = device
        self._networks, self._generator, self._noise = networks, own_generator, noise

    @torch.no_grad()
    def select_action(self, observation: Tree) -> tuple[Tensor, dict[str, Tensor]]:
        """The action (N, ...) for an observation (N, ...)."""
        networks = self._networks
        x = networks.encoder(observation)
        if not networks.actor.stochastic:
            action_NA = networks.actor.action(x)
            if self._generator is not None:
                noise_NA = torch.randn(
                    action_NA.shape, generator=self._generator, dtype=torch.float32, device=self.device
                )
                action_NA = action_NA.add_(noise_NA, alpha=self._noise()).clamp_(-1.0, 1.0)
            return networks.scale.to_action(action_NA), {}
        distribution = networks.actor.distribution(x)
        sample = distribution.mode() if self._generator is None else distribution.sample(self._generator)
        return networks.scale.to_action(sample.tanh()), {}

    def reset(self, mask: Tensor | None = None) -> None:
        """Nothing to forget: an action depends on the observation alone."""

    def state_dict(self) -> dict[str, Any]:
        """Its own generator; the networks are the agent's."""
        return {"generator": own_state(self._generator)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave. Raises ValueError for the state of the other kind of policy."""
        restore_own(self._generator, state["generator"])
