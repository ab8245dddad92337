"""Policies that share the networks of an agent.

Shapes: N environments, A actions or dimensions of an action, C features of a carry.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rein.agents.base.options import fraction
from rein.networks.actor_critic import ActorCritic
from rein.networks.continuous import ContinuousNetworks
from rein.networks.discrete import DiscreteNetworks
from rein.networks.q_network import QNetwork
from rein.networks.quantile_network import QuantileNetwork
from rein.networks.recurrent_q import RecurrentQNetwork
from rein.ops.exploration import epsilon_greedy
from rein.ops.random import own_state, restore_own
from rein.types import Tree


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
