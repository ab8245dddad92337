"""Custom networks: actors, critics and Q-networks from factories of the user.

A factory is called as `factory(observation_space, action_space, generator)` and returns a `torch.nn.Module`. The module
receives observations as the environment returns them, without reserved entries: a tensor (B, ...) or a dictionary of
tensors. Floating-point numbers are float32 and normalized if the agent normalizes observations.

If observations have a `critic_observation`, modules that compute values receive it as their last argument, flattened to
(B, C).

Shapes: B rows, P parameters of the distribution over actions, A dimensions of an action or Discrete actions, K critics,
C features of a critic observation.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from rein.networks.encoder import (
    EncoderFactory,
    Flatten,
    NetworkFactory,
    Preprocessor,
    encoder_for,
    features_of,
    inputs_of,
    through,
)
from rein.networks.factories import from_factory
from rein.networks.heads import ActionHead, ProductHead, action_head
from rein.ops.distributions import Distribution
from rein.ops.trees import leaves, map_tree
from rein.ops.values import nonempty_mask
from rein.spaces import children, is_image, scales, tensors_of, visible_space
from rein.types import Tree


def policy_outputs(action_space: spaces.Space[Any], *, state_dependent_std: bool = False) -> int:
    """Return the number of outputs P of a policy network, for all agents with an actor.

    The outputs are, in this order:

    - Discrete: A logits. MultiDiscrete, MultiBinary and a Box of integers: the logits of each integer.
    - Box: A means, and with `state_dependent_std` A log standard deviations. Actors of SAC, AWAC and IQL have both. The
      A outputs of an actor of TD3 and DDPG are actions before tanh.
    - Dict and Tuple: the outputs of all components, in the order of the space.
    """
    head = action_head(1, action_space, torch.Generator(), state_dependent_std=state_dependent_std)
    return sum(part.linear.out_features for part in _parts(head))


def _parts(head: ActionHead) -> list[Any]:
    """Return the discrete and continuous heads of which a head consists."""
    return [part for each in head.heads for part in _parts(each)] if isinstance(head, ProductHead) else [head]  # type: ignore[arg-type]  # a ModuleList of heads


class _Columns(nn.Module):
    """Selects the outputs of one head; replaces its linear layer."""

    def __init__(self, start: int, stop: int) -> None:
        super().__init__()
        self._start = start
        self._stop = stop

    def forward(self, x_BP: Tensor) -> Tensor:
        """Return (B, stop - start)."""
        return x_BP[..., self._start : self._stop]


def _without_layers(head: ActionHead) -> int:
    """Make a head return distributions for the outputs of a policy network. Returns their number P."""
    start = 0
    for part in _parts(head):
        stop = start + part.linear.out_features
        part.linear, start = _Columns(start, stop), stop
    return start


class TreePreprocessor(Preprocessor):
    """Preprocessor that keeps the structure of observations and does not flatten them.

    Floating-point numbers become float32 and, if `normalize` is set, are normalized, except for images.
    """

    def __init__(self, space: spaces.Space[Any], device: torch.device, **settings: Any) -> None:
        super().__init__(space, device, **{**settings, "custom_encoder": True})
        self._space = visible_space(space)
        (self._first, part), *_ = tensors_of(self._space)
        self._first_dimensions = len(part.shape or ()) + 1

    def _features(self, observation: Tree) -> Tree:
        first = observation
        for key in self._first:
            first = first[key]
        if first.ndim != self._first_dimensions:
            raise ValueError(
                f"expected observations of N environments, got one of shape {tuple(first.shape)} for {self._space}; "
                "for one environment, add a first dimension of 1"
            )
        observation = map_tree(_as_float32, observation)
        if self.normalizer is None:
            return observation
        flat_NF = super()._features(observation)
        widths = [int(spaces.flatdim(part)) for _, part in tensors_of(self._space)]
        return _normalized(self._space, observation, iter(flat_NF.split(widths, 1)))


def _as_float32(x: Tensor) -> Tensor:
    return x.float() if x.is_floating_point() else x


def _normalized(space: spaces.Space[Any], observation: Tree, columns: Iterator[Tensor]) -> Tree:
    """Replace the floating-point tensors of an observation by their normalized columns."""
    inner = children(space)
    if inner is not None:
        return {name: _normalized(part, observation[name], columns) for name, part in inner.items()}
    column = next(columns)
    return column.view(observation.shape) if observation.is_floating_point() else observation


class FlattenedEncoder(nn.Module):
    """Encoder of observations that are not flattened, for the default networks beside a custom network."""

    def __init__(
        self,
        space: spaces.Space[Any],
        generator: torch.Generator,
        factory: EncoderFactory | None,
        scale_images: bool,
    ) -> None:
        super().__init__()
        space = visible_space(space)
        scaling = {"scales": scales} if scale_images and factory is None else {}
        self._flatten = None if is_image(space) else Flatten(space, generator.device, **scaling)
        self.encoder = encoder_for(space, generator, factory)
        self.features = features_of(self.encoder, 0 if self._flatten is None else self._flatten.features)

    def forward(self, observation: Tree) -> Tensor:
        """Return the features (B, G)."""
        return through(self.encoder, observation if self._flatten is None else self._flatten(observation))


def encoder_of(
    preprocess: Preprocessor,
    space: spaces.Space[Any],
    generator: torch.Generator,
    factory: EncoderFactory | None,
    scale_images: bool,
) -> nn.Module | None:
    """Return the encoder of a default network for the outputs of a preprocessor; see `encoder_for`."""
    if isinstance(preprocess, TreePreprocessor):
        return FlattenedEncoder(space, generator, factory, scale_images)
    return encoder_for(space, generator, factory)


def _example(space: spaces.Space[Any], device: torch.device) -> Tree:
    """Return two observations of a space, zeros if the bounds allow them."""
    inner = children(space)
    if inner is not None:
        return {name: _example(part, device) for name, part in inner.items()}
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        return torch.as_tensor(np.stack([space.start] * 2), dtype=torch.int64, device=device)
    zero = np.zeros(space.shape or (), space.dtype)
    zero = np.clip(zero, space.low, space.high) if isinstance(space, spaces.Box) else zero
    signed = zero.dtype.kind != "u" or zero.dtype.itemsize == 1
    kind = "float32" if zero.dtype.kind == "f" else zero.dtype if signed else "int64"
    return torch.from_numpy(np.stack([zero.astype(kind)] * 2)).to(device)


def _shown(value: Any) -> str:
    return f"{tuple(value.shape)} of {value.dtype}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


class CustomModules:
    """Builds modules from factories and calls each with two observations to check its outputs."""

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        generator: torch.Generator,
        preprocess: Preprocessor,
    ) -> None:
        self._spaces = {"observation_space": visible_space(observation_space), "action_space": action_space}
        self._observation_space = observation_space
        self._preprocess = preprocess
        self._generator = generator

    def build(
        self, option: str, factory: NetworkFactory, outputs: dict[str, tuple[int, ...]], *, action: int | None = None
    ) -> nn.Module:
        """Return a new module whose outputs for two observations have these shapes.

        Args:
            option: Name of the option. All modules but actors receive critic observations.
            factory: Factory of the module.
            outputs: Shape of each output, by its description. Several outputs are a tuple.
            action: Dimensions A of the second argument of a critic, actions (B, A).
        """
        device = self._generator.device
        x = inputs_of(self._preprocess(_example(self._observation_space, device)))
        arguments = [x.features]
        if action is not None:
            arguments.append(torch.zeros(2, action, dtype=torch.float32, device=device))
        if x.critic is not None and option != "actor":
            arguments.append(x.critic)

        def trial(module: nn.Module) -> None:
            descriptions = [f"{path} {_shown(leaf)}".strip() for part in arguments for path, leaf in leaves(part)]
            called = f"{option}: {type(module).__name__} was called with two observations, {' and '.join(descriptions)}"
            try:
                with torch.no_grad():
                    returned = module(*arguments)
            except Exception as error:  # a custom module may raise anything
                error.add_note(called)
                raise
            if len(outputs) == 1:
                returned = (returned,)
            right = isinstance(returned, tuple) and len(returned) == len(outputs)
            if not right or not all(map(_fits, returned, outputs.values())):
                expected = ", ".join(f"{what} {shape}" for what, shape in outputs.items())
                got = ", ".join(map(_shown, returned)) if isinstance(returned, tuple) else _shown(returned)
                raise ValueError(
                    f"{called}, and returned {got}; expected {expected} of torch.float32 for the action space "
                    f"{self._spaces['action_space']}"
                )

        return from_factory(option, factory, self._spaces, self._generator, trial)


def _fits(value: Any, shape: tuple[int, ...]) -> bool:
    return isinstance(value, Tensor) and value.shape == shape and value.dtype == torch.float32


def _arguments(x: Any, *action: Tensor) -> tuple[Any, ...]:
    """Return the arguments of a module that computes values."""
    inputs = inputs_of(x)
    return (inputs.features, *action) if inputs.critic is None else (inputs.features, *action, inputs.critic)


class CustomActorCritic(nn.Module):
    """Distribution over actions and value of an observation from a custom network, like `ActorCritic`.

    The module returns the outputs of the policy (B, P), see `policy_outputs`, and the values (B,).
    """

    carry_size = 0

    def __init__(
        self,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        generator: torch.Generator,
        *,
        network: NetworkFactory,
        normalize_observation: bool = False,
        **head: Any,
    ) -> None:
        """Create the network. See `action_head` for the arguments in `head`."""
        super().__init__()
        settings = {"normalize": normalize_observation, "masks": True, "critic": True}
        self.preprocess = TreePreprocessor(observation_space, generator.device, **settings)
        self.policy_head = action_head(1, action_space, generator, **head)
        outputs = {"outputs of the policy": (2, _without_layers(self.policy_head)), "values": (2,)}
        modules = CustomModules(observation_space, action_space, generator, self.preprocess)
        self.network = modules.build("network", network, outputs)

    def forward(self, x: Any) -> tuple[Distribution, Tensor]:
        """Return the distribution over actions and the value (B,)."""
        outputs_BP, value_B = self.network(*_arguments(x))
        return self.policy_head(outputs_BP, inputs_of(x).action_mask), value_B

    def step(self, x: Any, carry: Tensor | None = None) -> tuple[Distribution, Tensor, None]:
        """Return the distribution, the value (N,) and no carry."""
        return *self(x), None

    def distribution_and_value(self, x: Any, carry: Tensor | None, reset: Tensor | None) -> tuple[Distribution, Tensor]:
        """Return the distribution and the value (B,)."""
        return self(x)

    def policy(self, x: Any, carry: Tensor | None = None) -> tuple[Distribution, None]:
        """Return the distribution and no carry."""
        return self(x)[0], None

    def value(self, x: Any, carry: Tensor | None = None) -> Tensor:
        """Return the value (N,)."""
        return self(x)[1]


class CustomCritics(nn.Module):
    """K critics from a factory, like `Critics`.

    Each module maps an observation and an action to the value (B,), or to several outputs (B, outputs).
    """

    def __init__(
        self, modules: CustomModules, factory: NetworkFactory, members: int, actions: int, outputs: int = 1
    ) -> None:
        super().__init__()
        shape = {"values": (2,)} if outputs == 1 else {"quantiles": (2, outputs)}
        self.networks = nn.ModuleList(modules.build("critic", factory, shape, action=actions) for _ in range(members))

    def forward(self, x: Any, action_BA: Tensor) -> Tensor:
        """Return the values (K, B)."""
        return torch.stack([network(*_arguments(x, action_BA)) for network in self.networks])

    def frozen(self, x: Any, action_BA: Tensor, members: int | None = None) -> Tensor:
        """Return the values of the first `members`."""
        return torch.stack([network(*_arguments(x, action_BA)) for network in self.networks[:members]])


class CustomValue(nn.Module):
    """State value from a factory, like `StateValue`. The module returns (B,)."""

    def __init__(self, modules: CustomModules, factory: NetworkFactory) -> None:
        super().__init__()
        self.network = modules.build("value", factory, {"values": (2,)})

    def forward(self, x: Any) -> Tensor:
        """Return the values (B,)."""
        return self.network(*_arguments(x))


class CustomActionValues(nn.Module):
    """K critics of Discrete actions from a factory, like `ActionValues`. Each module returns (B, A)."""

    def __init__(self, modules: CustomModules, factory: NetworkFactory, members: int, actions: int) -> None:
        super().__init__()
        self.networks = nn.ModuleList(
            modules.build("critic", factory, {"action values": (2, actions)}) for _ in range(members)
        )

    def forward(self, x: Any) -> Tensor:
        """Return the values (K, B, A)."""
        return torch.stack([network(*_arguments(x)) for network in self.networks])


class CustomDiscreteActor(nn.Module):
    """Actor of Discrete actions from a custom network, like `DiscreteActor`. The module returns logits (B, A)."""

    def __init__(
        self,
        modules: CustomModules,
        factory: NetworkFactory,
        action_space: spaces.Space[Any],
        generator: torch.Generator,
    ) -> None:
        super().__init__()
        self.head = action_head(1, action_space, generator)
        self.network = modules.build("actor", factory, {"logits": (2, _without_layers(self.head))})

    def forward(self, x: Any) -> Distribution:
        """Return the distribution over valid actions. A row without a valid action counts as unmasked."""
        features, mask_BA, _ = inputs_of(x)
        return self.head(self.network(features), None if mask_BA is None else nonempty_mask(mask_BA))
