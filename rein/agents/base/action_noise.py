"""Exploration: adaptive amounts of exploration, action noise, random actions.

Shapes: N environments, A action dimensions, L choices of an action, E episodes, W episodes of the window.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from rein.networks.heads import width
from rein.ops.exploration import ornstein_uhlenbeck, random_valid, reset_noise
from rein.ops.trees import leaves
from rein.schedules import Schedule, as_schedule
from rein.spaces import choices, mask_of
from rein.types import Tree


@attrs.define(eq=False, slots=False)
class AdaptiveExploration:
    """Adaptive number that grows while returns stagnate and shrinks while they change. Use it like a schedule.

    Each ended episode after the first one updates the value. The value depends on the last W = `window` returns
    (all returns, if there are fewer) and is clamped to [low, high]::

        value <- value * up      if |mean of the newer half - mean of the older half| < threshold
        value <- value * down    otherwise

    The defaults suit the epsilon of an agent with discrete actions. For the standard deviation of action noise, use
    `AdaptiveExploration(0.01, low=0.001, high=0.2, up=1.1, down=0.9995)`.

    Raises:
        ValueError: If an argument is out of range.
    """

    start: float = 1.0
    low: float = attrs.field(default=0.01, kw_only=True)
    high: float = attrs.field(default=1.0, kw_only=True)
    up: float = attrs.field(default=1.005, kw_only=True)
    down: float = attrs.field(default=0.995, kw_only=True)
    window: int = attrs.field(default=500, kw_only=True)
    threshold: float = attrs.field(default=0.01, kw_only=True)

    def __attrs_post_init__(self) -> None:
        if not 0.0 < self.low <= self.start <= self.high < math.inf:
            raise ValueError(f"start={self.start}, low={self.low}, high={self.high}: give 0 < low <= start <= high")
        if not 0.0 < self.down <= 1.0 <= self.up < math.inf:
            raise ValueError(f"up={self.up}, down={self.down}: give 0 < down <= 1 <= up")
        if self.window < 2 or self.window % 2:
            raise ValueError(f"window={self.window}: give an even number, since two halves are compared")
        if not self.threshold >= 0.0:
            raise ValueError(f"threshold={self.threshold}: give 0 or more")
        self._value = self.start
        self._return_W = torch.zeros(0, dtype=torch.float64, device="cpu")  # oldest first

    @property
    def config(self) -> dict[str, Any]:
        """The arguments of the constructor, as JSON."""
        return attrs.asdict(self)

    @property
    def bounds(self) -> tuple[float, float]:
        """Smallest and largest value."""
        return self.low, self.high

    def __call__(self, *, env_steps: int | None = None, updates: int | None = None) -> float:
        """Return the current value. The counts are ignored."""
        return self._value

    def observe(self, returns_E: Tensor | Sequence[float]) -> None:
        """Update the value with the returns (E,) of ended episodes, in their order. They are copied to the CPU."""
        return_E = torch.as_tensor(returns_E, dtype=torch.float64, device="cpu")
        history = torch.cat((self._return_W, return_E))
        low, high = self.bounds
        for plateau in self._plateaus(history, len(return_E)):
            factor = 1.0 if plateau is None else self.up if plateau else self.down
            self._value = min(max(self._value * factor, low), high)
        self._return_W = history[-self.window :].clone()

    def _plateaus(self, history: Tensor, episodes: int) -> list[bool | None]:
        """Return for each of the last `episodes` episodes whether returns stagnated; None with fewer than 2 returns."""
        sum_before = torch.cat((history.new_zeros(1), history.cumsum(0)))
        end_E = torch.arange(len(history) - episodes + 1, len(history) + 1, device="cpu")
        half_E = end_E.clamp(max=self.window) // 2
        newer_E = sum_before[end_E] - sum_before[end_E - half_E]
        older_E = sum_before[end_E - half_E] - sum_before[end_E - 2 * half_E]
        plateau_E = (newer_E - older_E).abs() < self.threshold * half_E
        return [plateau if half else None for plateau, half in zip(plateau_E.tolist(), half_E.tolist(), strict=True)]

    def state_dict(self) -> dict[str, Any]:
        """Return the value and the returns in the window."""
        return {"value": self._value, "returns": self._return_W}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that `state_dict` returned. Raises ValueError if it has more returns than the window."""
        value, returns = float(state["value"]), state["returns"]
        if len(returns) > self.window:
            raise ValueError(f"the state has {len(returns)} returns, but the window is {self.window}")
        self._value = value
        self._return_W = returns.to("cpu", torch.float64, copy=True)


Amount = Schedule | AdaptiveExploration


def as_amount(value: float | Amount) -> Amount:
    """Return an `AdaptiveExploration` unchanged, and any other value as a schedule."""
    return value if isinstance(value, AdaptiveExploration) else as_schedule(value)


class GaussianNoise:
    """Uncorrelated Gaussian action noise.

    Source: Fujimoto et al. 2018 (TD3), section 6.1.

    Args:
        std: Standard deviation: a number, a schedule or an `AdaptiveExploration`.

    Raises:
        ValueError: If `std` can be negative.
    """

    def __init__(self, std: float | Amount = 0.1) -> None:
        self.amount = _not_negative("GaussianNoise(std=...)", std)

    @property
    def config(self) -> dict[str, Any]:
        """The arguments of the constructor, as JSON."""
        return {"noise": "gaussian", "std": self.amount.config}

    def __call__(
        self, action_NA: Tensor, generator: torch.Generator, *, env_steps: int | None = None, updates: int | None = None
    ) -> Tensor:
        """Return noise with the shape of the actions. `std` is evaluated at the given counts."""
        return _normal(action_NA, generator).mul_(self.amount(env_steps=env_steps, updates=updates))

    def reset(self, mask_N: Tensor) -> None:
        """Do nothing, since the noise of a step does not depend on earlier steps."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state of `std`; empty unless it is an `AdaptiveExploration`."""
        return _state_of(self.amount)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that `state_dict` returned."""
        _load_into(self.amount, state)


class OrnsteinUhlenbeck:
    """Ornstein-Uhlenbeck action noise: a mean-reverting random walk per environment, which starts each episode at `mu`.

    See `rein.ops.exploration.ornstein_uhlenbeck` for the equation.

    Args:
        theta: Rate of reversion to `mu` per step, from 0 to 1.
        sigma: Standard deviation of a step: a number, a schedule or an `AdaptiveExploration`.
        mu: Mean of the noise.

    Raises:
        ValueError: If `theta` is not in [0, 1] or `sigma` can be negative.
    """

    def __init__(self, theta: float = 0.15, sigma: float | Amount = 0.2, mu: float = 0.0) -> None:
        if not 0.0 <= theta <= 1.0:
            raise ValueError(f"OrnsteinUhlenbeck(theta={theta}): give a number from 0 to 1")
        self.theta = theta
        self.amount = _not_negative("OrnsteinUhlenbeck(sigma=...)", sigma)
        self.mu = mu
        self._state_NA: Tensor | None = None  # created with the shape of the first actions

    @property
    def config(self) -> dict[str, Any]:
        """The arguments of the constructor, as JSON."""
        return {"noise": "ornstein_uhlenbeck", "theta": self.theta, "sigma": self.amount.config, "mu": self.mu}

    def __call__(
        self, action_NA: Tensor, generator: torch.Generator, *, env_steps: int | None = None, updates: int | None = None
    ) -> Tensor:
        """Return the next noise, with the shape of the actions. `sigma` is evaluated at the given counts."""
        state_NA = torch.full_like(action_NA, self.mu) if self._state_NA is None else self._state_NA
        if state_NA.shape != action_NA.shape:
            before, after = tuple(state_NA.shape), tuple(action_NA.shape)
            raise ValueError(
                f"OrnsteinUhlenbeck: the shape of actions changed from {before} to {after}; use one instance per shape"
            )
        sigma = self.amount(env_steps=env_steps, updates=updates)
        noise_NA = _normal(action_NA, generator)
        self._state_NA = ornstein_uhlenbeck(state_NA.to(action_NA.device), noise_NA, self.theta, self.mu, sigma)
        return self._state_NA.clone()  # the caller may modify the result

    def reset(self, mask_N: Tensor) -> None:
        """Restart the random walks of the environments in `mask_N` (N,), which start new episodes."""
        if self._state_NA is not None:
            self._state_NA = reset_noise(self._state_NA.to(mask_N.device), mask_N, self.mu)

    def state_dict(self) -> dict[str, Any]:
        """Return the positions of the random walks and, if `sigma` is an `AdaptiveExploration`, its state."""
        return {"state": self._state_NA, **_state_of(self.amount)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that `state_dict` returned."""
        state_NA = state["state"]
        if state_NA is not None and state_NA.ndim < 2:
            raise ValueError(f"OrnsteinUhlenbeck: expected a state of shape (N, A), got {tuple(state_NA.shape)}")
        _load_into(self.amount, state)
        self._state_NA = None if state_NA is None else state_NA.clone()


ActionNoise = GaussianNoise | OrnsteinUhlenbeck


def as_noise(noise: ActionNoise | float) -> ActionNoise:
    """Return noise unchanged, and a number or a schedule as Gaussian noise with this standard deviation."""
    return noise if isinstance(noise, GaussianNoise | OrnsteinUhlenbeck) else GaussianNoise(noise)


def _normal(action_NA: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(action_NA.shape, generator=generator, dtype=action_NA.dtype, device=action_NA.device)


def _not_negative(name: str, value: float | Amount) -> Amount:
    amount = as_amount(value)
    if not amount.bounds[0] >= 0.0:
        raise ValueError(f"{name}: the smallest value is {amount.bounds[0]}; give 0 or more")
    return amount


def _state_of(amount: Amount) -> dict[str, Any]:
    return {"amount": amount.state_dict()} if isinstance(amount, AdaptiveExploration) else {}


def _load_into(amount: Amount, state: Mapping[str, Any]) -> None:
    if isinstance(amount, AdaptiveExploration):
        amount.load_state_dict(state["amount"])


def random_choices(space: spaces.Space[Any], mask_NL: Tensor, generator: torch.Generator) -> Tensor:
    """Sample actions (N, *A) int64 from a discrete space, each integer uniformly among its valid choices.

    L is the number of choices of all integers of an action, see `rein.networks.heads.choices`. The mask is boolean.
    """
    sizes, start = choices(space)
    chosen = [random_valid(mask_NA, generator) for mask_NA in mask_NL.split(sizes, -1)]
    action = torch.stack(chosen, -1).reshape(-1, *start.shape)
    return action + torch.as_tensor(start, dtype=torch.int64, device=generator.device)


def random_action(space: spaces.Space[Any], observation: Tree, generator: torch.Generator) -> Tensor:
    """Sample uniform actions (N, ...) from a Discrete space or a Box with finite bounds.

    `observation` (N, ...) determines N. If it has an `action_mask`, only valid actions are sampled. Raises ValueError
    for other spaces, and for a Box whose high - low is not finite in float32.
    """
    rows, device = len(next(leaf for _, leaf in leaves(observation))), generator.device
    if isinstance(space, spaces.Discrete):
        first = int(space.start)
        if (mask_NA := mask_of(observation)) is not None:
            return random_valid(mask_NA.to(device), generator) + first
        return torch.randint(first, first + int(space.n), (rows,), generator=generator, device=device)
    if isinstance(space, spaces.Box) and np.isfinite(width(space)).all():
        low, high = (torch.as_tensor(bound, dtype=torch.float32, device=device) for bound in (space.low, space.high))
        return torch.lerp(
            low, high, torch.rand((rows, *space.shape), generator=generator, dtype=torch.float32, device=device)
        )
    raise ValueError(
        f"cannot sample random actions from {space}: the action space must be Discrete, or a Box with finite bounds and"
        " a high - low that is finite in float32"
    )
