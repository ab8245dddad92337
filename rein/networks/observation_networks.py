"""Networks for custom agents: observations of an environment in, distributions over actions or values out.

Shapes: B rows, A actions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from gymnasium import spaces
from torch import Tensor, nn

from rein.networks.encoder import Features, Preprocessor, encoder_for, features_of, inputs_of
from rein.networks.heads import ActionHead, action_head
from rein.networks.mlp import Stack, orthogonal_linear
from rein.networks.off_policy import critic_features
from rein.ops.distributions import Distribution
from rein.ops.values import mask_values
from rein.spaces import mask_of
from rein.types import Tree


class ActionDistribution(NamedTuple):
    """Distribution over the actions of a space, one for each of B rows."""

    head: ActionHead
    of_samples: Distribution

    def sample(self, generator: torch.Generator) -> Tree:
        """Draw actions (B, ...)."""
        return self.head.to_action(self.of_samples, self.of_samples.sample(generator))

    def mode(self) -> Tree:
        """Return the most likely actions (B, ...); of a squashed Gaussian, the median."""
        return self.head.to_action(self.of_samples, self.of_samples.mode())

    def log_prob(self, action: Tree) -> Tensor:
        """Return the log probabilities or densities (B,) of actions (B, ...)."""
        return self.of_samples.log_prob(self.head.from_action(self.of_samples, action))

    def entropy(self) -> Tensor:
        """Return the entropies (B,) in nats."""
        return self.of_samples.entropy()


class ObservationNetwork(nn.Module):
    """Preprocessor, convolutions for images, and hidden layers. Subclasses add a head."""

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        generator: torch.Generator,
        hidden: Sequence[int],
        activation: str,
        *,
        masks: bool = False,
        critic: bool = False,
    ) -> None:
        super().__init__()
        self.preprocess = Preprocessor(observation_space, generator.device, masks=masks, critic=critic)
        self.encoder = encoder_for(observation_space, generator)
        inputs = features_of(self.encoder, self.preprocess.features) + self.preprocess.privileged
        self.hidden = Stack(1, inputs, hidden, activation, generator)

    def features(self, x: Features) -> Tensor:
        """Return the features (B, H) of preprocessed observations."""
        return self.hidden(critic_features(self.encoder, x))[0]


class ActorNetwork(ObservationNetwork):
    """Network from observations (B, ...) to an `ActionDistribution`."""

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        generator: torch.Generator,
        hidden: Sequence[int],
        activation: str,
    ) -> None:
        super().__init__(observation_space, generator, hidden, activation, masks=True)
        self.head = action_head(self.hidden.features, action_space, generator, squash=None)

    def forward(self, observation: Tree) -> ActionDistribution:
        """Return the distribution over actions."""
        x = self.preprocess(observation)
        return ActionDistribution(self.head, self.head(self.features(x), inputs_of(x).action_mask))


class ValueNetwork(ObservationNetwork):
    """Network from observations (B, ...) to values (B,) of states, or (B, A) of actions."""

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        actions: int | None,
        generator: torch.Generator,
        hidden: Sequence[int],
        activation: str,
    ) -> None:
        super().__init__(observation_space, generator, hidden, activation, critic=actions is None)
        self._of_states = actions is None
        self.head = orthogonal_linear(self.hidden.features, actions or 1, 1.0, generator)

    def forward(self, observation: Tree) -> Tensor:
        """Return the values."""
        values = self.head(self.features(self.preprocess(observation)))
        return values.squeeze(-1) if self._of_states else mask_values(values, mask_of(observation))


def actor(
    observation_space: spaces.Space[Any],
    action_space: spaces.Space[Any],
    *,
    generator: torch.Generator,
    hidden: Sequence[int] = (64, 64),
    activation: str = "tanh",
) -> ActorNetwork:
    """Return a network from observations (B, ...) to a distribution over actions.

    The distribution has `sample(generator)`, `mode()`, `log_prob(action)` and `entropy()`. It is categorical for
    Discrete, MultiDiscrete and MultiBinary actions and for integers of a Box. For other Boxes it is a Gaussian,
    squashed by tanh if the bounds are finite. The components of a Dict or Tuple are independent, and their actions are
    a dictionary. Images go through convolutions, other observations are flattened. If observations have the entry
    `action_mask`, invalid actions have probability 0. Parameters are drawn from `generator`.
    """
    return ActorNetwork(observation_space, action_space, generator, hidden, activation)


def critic(
    observation_space: spaces.Space[Any],
    *,
    generator: torch.Generator,
    hidden: Sequence[int] = (64, 64),
    activation: str = "tanh",
) -> ValueNetwork:
    """Return a network from observations (B, ...) to the values (B,) of states.

    If observations have the entry `critic_observation`, it is concatenated to the encoded observation.
    """
    return ValueNetwork(observation_space, None, generator, hidden, activation)


def q_network(
    observation_space: spaces.Space[Any],
    action_space: spaces.Space[Any],
    *,
    generator: torch.Generator,
    hidden: Sequence[int] = (64, 64),
    activation: str = "relu",
) -> ValueNetwork:
    """Return a network from observations (B, ...) to the values (B, A) of A Discrete actions.

    If observations have an `action_mask`, the values of masked actions are finite and below all others. Do not average
    over actions then.
    """
    if not isinstance(action_space, spaces.Discrete):
        raise ValueError(f"the action space is {action_space}; q_network requires Discrete actions")
    return ValueNetwork(observation_space, int(action_space.n), generator, hidden, activation)
