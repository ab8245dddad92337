"""Q-networks: values of all Discrete actions, quantiles of their returns, recurrent values, and target networks.

Shapes: T steps in time, N environments, B rows or sequences, F features of an observation, H features, C size of a
carry or number of cosines, Q levels, A actions, Z atoms, E numbers of noise.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import torch
from gymnasium import spaces
from torch import Tensor, nn

from rein.networks.actor_critic import CoreFactory
from rein.networks.custom_networks import CustomModules, TreePreprocessor
from rein.networks.encoder import (
    EncoderFactory,
    Features,
    NetworkFactory,
    Preprocessor,
    encoder_for,
    features_of,
    inputs_of,
    through,
)
from rein.networks.heads import count_actions
from rein.networks.mlp import Stack, new_activation, orthogonal_linear
from rein.networks.noisy import NoisyLinear
from rein.ops.values import mask_values


class DuelingHead(nn.Module):
    """Dueling head, (B, H) -> Q (B, A)::

        Q(s, a) = V(s) + A(s, a) - mean_a' A(s, a')

    V is the first output of one linear layer and equals the mean of Q over all actions. The mean includes actions that
    are masked, so that Q does not depend on the mask. Weights are orthogonal with gain 1, biases are zero. They are
    drawn from `generator`.

    Source: Wang et al. 2016, equation 9.
    """

    def __init__(self, features: int, actions: int, generator: torch.Generator) -> None:
        super().__init__()
        self.linear = orthogonal_linear(features, 1 + actions, 1.0, generator)

    def forward(self, features_BH: Tensor) -> Tensor:
        """Return the values (B, A)."""
        both = self.linear(features_BH)
        value_B1, advantage_BA = both[..., :1], both[..., 1:]
        return advantage_BA + (value_B1 - advantage_BA.mean(-1, keepdim=True))


def _head(features: int, actions: int, dueling: bool, generator: torch.Generator) -> nn.Module:
    return (
        DuelingHead(features, actions, generator) if dueling else orthogonal_linear(features, actions, 1.0, generator)
    )


class _ActionValueNetwork(nn.Module):
    """Base class: a preprocessor and an encoder of observations. Raises ValueError if the actions are not Discrete."""

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        generator: torch.Generator,
        *,
        encoder: EncoderFactory | None = None,
        normalize_observation: bool = False,
        scale_images: bool = True,
        custom: bool = False,
    ) -> None:
        """Create both, without an encoder if `custom` is set. See `encoder_for` for `encoder`."""
        super().__init__()
        self.actions = count_actions(action_space)
        self.preprocess = (TreePreprocessor if custom else Preprocessor)(
            observation_space,
            generator.device,
            normalize=normalize_observation,
            scale_images=scale_images,
            custom_encoder=encoder is not None,
            masks=True,
        )
        if not custom:
            self.encoder = encoder_for(observation_space, generator, encoder)
            self.inputs = features_of(self.encoder, self.preprocess.features)


class QNetwork(_ActionValueNetwork):
    """Network of values Q(s, a) of all actions for an observation.

    The network consists of an encoder, hidden layers and a linear or dueling head. With `layer_norm`, hidden layers are
    normalized over their features before the activation (Ba et al. 2016). Temporal differences then stay bounded
    without target network and replay (Gallici et al. 2024). The encoder is not normalized.

    Weights are orthogonal with gain sqrt(2), in the head 1. Biases are zero. Parameters are drawn from `generator`, on
    its device. Raises ValueError if the actions are not Discrete.
    """

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        generator: torch.Generator,
        *,
        hidden: Sequence[int] = (128, 128),
        activation: str = "relu",
        layer_norm: bool = True,
        dueling: bool = False,
        network: NetworkFactory | None = None,
        **observations: Any,
    ) -> None:
        """Create the network. See `DuelingHead` for `dueling`.

        A `network` replaces all layers. It returns the values (B, A), see `rein.networks.custom_networks`.
        `observations` are the options `encoder`, `normalize_observation` and `scale_images`.
        """
        super().__init__(observation_space, action_space, generator, custom=network is not None, **observations)
        self.network: nn.Module | None = None
        if network is not None:
            modules = CustomModules(observation_space, action_space, generator, self.preprocess)
            self.network = modules.build("network", network, {"action values": (2, self.actions)})
            return
        sizes = [self.inputs, *hidden]
        if layer_norm:
            self.hidden: nn.Module = _normalized(sizes, activation, generator)
        else:
            self.hidden = Stack(1, sizes[0], hidden, activation, generator)
        self.head = _head(sizes[-1], self.actions, dueling, generator)

    def forward(self, x: Features) -> Tensor:
        """Return the values (B, A) of preprocessed observations. Those of masked actions are below all others."""
        x_BF, mask_BA, _ = inputs_of(x)
        if self.network is not None:
            return mask_values(self.network(x_BF), mask_BA)
        hidden = self.hidden(through(self.encoder, x_BF))
        return mask_values(self.head(hidden[0] if isinstance(self.hidden, Stack) else hidden), mask_BA)


def _normalized(sizes: Sequence[int], activation: str, generator: torch.Generator) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(sizes):
        layers.append(orthogonal_linear(inputs, outputs, math.sqrt(2.0), generator))
        layers += [nn.LayerNorm(outputs, dtype=torch.float32, device=generator.device), new_activation(activation)]
    return nn.Sequential(*layers)


class QuantileNetwork(_ActionValueNetwork):
    """Implicit quantile network: an observation and a level tau -> Z_tau(s, a) of every action.

    The quantiles are::

        Z_tau(s, .) = f(psi(s) * phi(tau))        phi(tau) = relu(W (cos(pi i tau))_i=0..C-1 + b)

    psi is the encoder and all hidden layers but the last one. f is the last hidden layer and a linear head. The product
    is taken feature by feature.

    Q(s, a) = E Z_tau(s, a) is the mean over `action_quantiles` levels, evenly spaced in (0, risk). With `risk` below 1
    it is the mean of the lowest returns only, their conditional value at risk.

    Weights are orthogonal with gain sqrt(2), in the head 1. Biases are zero. Parameters are drawn from `generator`, on
    its device. Raises ValueError if the actions are not Discrete.

    Source: Dabney et al. 2018 (IQN), 3.1 and equation 4.
    """

    levels: Tensor
    _frequency: Tensor

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        generator: torch.Generator,
        *,
        hidden: Sequence[int] = (128, 128),
        activation: str = "relu",
        cosines: int = 64,
        action_quantiles: int = 32,
        risk: float = 1.0,
        **observations: Any,
    ) -> None:
        """Create the network. `cosines` is C. See `QNetwork` for `observations`."""
        super().__init__(observation_space, action_space, generator, **observations)
        device = generator.device
        self.before = Stack(1, self.inputs, hidden[:-1], activation, generator)
        self.embedding = orthogonal_linear(cosines, self.before.features, math.sqrt(2.0), generator)
        self.after = Stack(1, self.before.features, hidden[-1:], activation, generator)
        self.head = orthogonal_linear(self.after.features, self.actions, 1.0, generator)
        frequency_C = torch.arange(cosines, dtype=torch.float32, device=device) * math.pi
        self.register_buffer("_frequency", frequency_C, persistent=False)
        self.register_buffer("levels", even_levels(action_quantiles, device) * risk, persistent=False)

    def forward(self, x: Features) -> Tensor:
        """Return Q (B, A) of preprocessed observations. The values of masked actions are below all others."""
        x_BF, mask_BA, _ = inputs_of(x)
        return mask_values(self.quantiles(x_BF, self.levels.expand(x_BF.shape[0], -1)).mean(1), mask_BA)

    def quantiles(self, x_BF: Tensor, level_BQ: Tensor) -> Tensor:
        """Return Z (B, Q, A) of all actions at levels in (0, 1)."""
        psi_BH = self.before(through(self.encoder, x_BF))[0]
        phi_BQH = self.embedding((level_BQ.unsqueeze(-1) * self._frequency).cos()).relu()
        both = (psi_BH.unsqueeze(1) * phi_BQH).flatten(0, 1)
        return self.head(self.after(both)[0]).unflatten(0, level_BQ.shape)


def even_levels(count: int, device: torch.device | str = "cpu") -> Tensor:
    """Return the midpoints of `count` equal parts of (0, 1), (Q,): levels of QR-DQN (Dabney et al. 2018, lemma 2)."""
    return (torch.arange(count, dtype=torch.float32, device=device) + 0.5) / count


class CategoricalQNetwork(_ActionValueNetwork):
    """Network of the probabilities of returns of all actions, on Z evenly spaced atoms. Its layers are noisy.

    The network consists of an encoder, hidden layers and a head. With `dueling`, the logits of an action are::

        l_z(s, a) = V_z(s) + A_z(s, a) - mean_a' A_z(s, a')

    See `NoisyLinear` for the noise and the initial parameters. The encoder has no noise. Parameters are drawn from
    `generator`, on its device. Raises ValueError if the actions are not Discrete.

    Sources: Bellemare et al. 2017 (C51); Hessel et al. 2018 (Rainbow).
    """

    support: Tensor

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        generator: torch.Generator,
        *,
        value_range: tuple[float, float],
        hidden: Sequence[int] = (128, 128),
        activation: str = "relu",
        dueling: bool = True,
        noise_std: float = 0.5,
        atoms: int = 51,
        **observations: Any,
    ) -> None:
        """Create the network. `atoms` is Z, from the first to the last value of `value_range`."""
        super().__init__(observation_space, action_space, generator, **observations)
        self.dueling = dueling
        self.activation = new_activation(activation)
        sizes = [self.inputs, *hidden, (dueling + self.actions) * atoms]
        self.layers = nn.ModuleList(NoisyLinear(*pair, noise_std, generator) for pair in itertools.pairwise(sizes))
        support = torch.linspace(*value_range, atoms, dtype=torch.float32, device=generator.device)
        self.register_buffer("support", support, persistent=False)

    @property
    def noise_size(self) -> int:
        """Number E of normal numbers of a forward pass with noise."""
        return sum(layer.noise_size for layer in self.layers)  # type: ignore[misc]

    def forward(self, x: Features, noise_E: Tensor | None = None) -> Tensor:
        """Return Q (B, A) of preprocessed observations. The values of masked actions are below all others."""
        x_BF, mask_BA, _ = inputs_of(x)
        return mask_values((self.log_probs(x_BF, noise_E).exp() * self.support).sum(2), mask_BA)

    def log_probs(self, x_BF: Tensor, noise_E: Tensor | None = None) -> Tensor:
        """Return the log probabilities (B, A, Z), by default without noise."""
        h = through(self.encoder, x_BF)
        noises: Any = [None] * len(self.layers)
        if noise_E is not None:
            noises = noise_E.split([layer.noise_size for layer in self.layers])  # type: ignore[misc]
        *hidden, head = self.layers
        for layer, noise in zip(hidden, noises, strict=False):
            h = self.activation(layer(h, noise))
        logit_BAZ = head(h, noises[-1]).unflatten(1, (-1, len(self.support)))
        if self.dueling:
            value_B1Z, advantage_BAZ = logit_BAZ[:, :1], logit_BAZ[:, 1:]
            logit_BAZ = advantage_BAZ + (value_B1Z - advantage_BAZ.mean(1, keepdim=True))
        return logit_BAZ.log_softmax(2)


class RecurrentQNetwork(_ActionValueNetwork):
    """Recurrent Q-network: an encoder, hidden layers, a recurrent core and a linear or dueling head.

    The memory of an environment is its carry, one row of numbers; zeros begin an episode. Weights are orthogonal,
    biases are zero except in cores. Parameters are drawn from `generator`, on its device.

    Raises ValueError if the actions are not Discrete.
    """

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        generator: torch.Generator,
        *,
        core: CoreFactory,
        hidden: Sequence[int] = (64,),
        activation: str = "relu",
        dueling: bool = False,
        **observations: Any,
    ) -> None:
        """Create the network. See `rein.networks.recurrent` for `core`, and `QNetwork` for `observations`."""
        super().__init__(observation_space, action_space, generator, **observations)
        self.hidden = Stack(1, self.inputs, hidden, activation, generator)
        self.core = core(inputs=self.hidden.features, generator=generator)
        self.head = _head(self.core.features, self.actions, dueling, generator)

    @property
    def carry_size(self) -> int:
        """Size C of the carry."""
        return self.core.carry_size

    def step(self, x_NF: Tensor, carry_NC: Tensor) -> tuple[Tensor, Tensor]:
        """Return the values (N, A), and the carry after this step."""
        y_NH, carry_NC = self.core.step(self._hidden(x_NF), carry_NC)
        return self.head(y_NH), carry_NC

    def sequence(self, x_TBF: Tensor, carry_BC: Tensor) -> Tensor:
        """Return the values (T, B, A) of `step` at each of T steps of one episode."""
        hidden_TBH = self._hidden(x_TBF.flatten(0, 1)).unflatten(0, x_TBF.shape[:2])
        never_TB = torch.zeros(x_TBF.shape[:2], dtype=torch.bool, device=x_TBF.device)
        return self.head(self.core.sequence(hidden_TBH, carry_BC, never_TB)[0])

    def warm_up(self, x_TBF: Tensor, carry_BC: Tensor, valid_TB: Tensor) -> Tensor:
        """Return the carry (B, C) after the valid steps, starting from this carry."""
        if not len(x_TBF):
            return carry_BC
        hidden_TBH = self._hidden(x_TBF.flatten(0, 1)).unflatten(0, x_TBF.shape[:2])
        for hidden_BH, valid_B1 in zip(hidden_TBH.unbind(), valid_TB.unsqueeze(-1).unbind(), strict=True):
            carry_BC = torch.where(valid_B1, self.core.step(hidden_BH, carry_BC)[1], carry_BC)
        return carry_BC

    def _hidden(self, x_BF: Tensor) -> Tensor:
        return self.hidden(through(self.encoder, x_BF))[0]


Network = TypeVar("Network", QNetwork, QuantileNetwork, CategoricalQNetwork, RecurrentQNetwork)


class OnlineAndTarget(nn.Module, Generic[Network]):
    """Network that learns, `online`, and a copy of it, `target`, which has no gradient and is updated more slowly."""

    def __init__(self, online: Network) -> None:
        super().__init__()
        self.online: Network = online
        self.target: Network = copy.deepcopy(online).requires_grad_(False)

    @property
    def preprocess(self) -> Preprocessor:
        """Preprocessor of the online network, which collects the statistics of observations."""
        return self.online.preprocess
