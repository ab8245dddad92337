"""Exploration: amounts that follow a schedule or the returns, action noise, random actions.

Shapes: N environments, A dimensions of an action, E episodes, W of them in the window.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from rein.networks.heads import width
from rein.ops.exploration import ornstein_uhlenbeck, reset_noise
from rein.ops.trees import leaves
from rein.schedules import Schedule, as_schedule
from rein.types import Tree


class Plateau:
    """A number that grows while returns stand still and shrinks while they change; it is read like a schedule.

    With each episode that ends, of the last W = `window` returns, or of all while there are fewer,

        value <- value * up      where |mean of the newer half - mean of the older half| < threshold
        value <- value * down    elsewhere

    within [low, high], from the second episode on. The defaults suit the epsilon of a discrete agent; for the standard
    deviation of a continuous one's noise there is `Plateau(0.01, low=0.001, high=0.2, up=1.1, down=0.9995)`.

    Raises ValueError for numbers out of their range.
    """

    def __init__(
        self,
        start: float = 1.0,
        *,
        low: float = 0.01,
        high: float = 1.0,
        up: float = 1.005,
        down: float = 0.995,
        window: int = 500,
        threshold: float = 0.01,
    ) -> None:
        if not 0.0 < low <= start <= high < math.inf:
            raise ValueError(f"Plateau({start}, low={low}, high={high}): give 0 < low <= start <= high")
        if not 0.0 < down <= 1.0 <= up < math.inf:
            raise ValueError(f"Plateau(up={up}, down={down}): give up from 1, and down from above 0 to 1")
        if window < 2 or window % 2:
            raise ValueError(f"Plateau(window={window}): give an even number, it has two halves")
        if not threshold >= 0.0:
            raise ValueError(f"Plateau(threshold={threshold}): give 0 or more")
        self.config: dict[str, Any] = {
            "start": start,
            "low": low,
            "high": high,
            "up": up,
            "down": down,
            "window": window,
            "threshold": threshold,
        }
        self.bounds = (low, high)
        self._up, self._down, self._window, self._threshold = up, down, window, threshold
        self._value = start
        self._return_W = torch.zeros(0, dtype=torch.float64, device="cpu")  # the oldest one first

    def __call__(self, *, env_steps: int | None = None, updates: int | None = None) -> float:
        """The value now, whatever the counts are."""
        return self._value

    def observe(self, returns_E: Tensor | Sequence[float]) -> None:
        """Take in the returns of episodes that ended, (E,), in their order; they come to the host."""
        return_E = torch.as_tensor(returns_E, dtype=torch.float64, device="cpu")
        history = torch.cat((self._return_W, return_E))
        low, high = self.bounds
        for plateau in self._plateaus(history, len(return_E)):
            factor = 1.0 if plateau is None else self._up if plateau else self._down
            self._value = min(max(self._value * factor, low), high)
        self._return_W = history[-self._window :].clone()

    def _plateaus(self, history: Tensor, episodes: int) -> list[bool | None]:
        """Whether returns stood still when each of the last `episodes` was the newest; None where there is no half."""
        sum_before = torch.cat((history.new_zeros(1), history.cumsum(0)))
        end_E = torch.arange(len(history) - episodes + 1, len(history) + 1, device="cpu")
        half_E = end_E.clamp(max=self._window) // 2
        newer_E = sum_before[end_E] - sum_before[end_E - half_E]
        older_E = sum_before[end_E - half_E] - sum_before[end_E - 2 * half_E]
        plateau_E = (newer_E - older_E).abs() < self._threshold * half_E
        return [still if half else None for still, half in zip(plateau_E.tolist(), half_E.tolist(), strict=True)]

    def state_dict(self) -> dict[str, Any]:
        """The value, and the returns that it goes by."""
        return {"value": self._value, "returns": self._return_W}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave; ValueError for more returns than the window holds."""
        value, returns = float(state["value"]), state["returns"]
        if len(returns) > self._window:
            raise ValueError(f"{len(returns)} returns are more than the window of this plateau, {self._window}")
        self._value = value
        self._return_W = returns.to("cpu", torch.float64, copy=True)


Amount = Schedule | Plateau


def as_amount(value: float | Amount) -> Amount:
    """What says how much to explore: a plateau as it is, a schedule from anything else."""
    return value if isinstance(value, Plateau) else as_schedule(value)


class GaussianNoise:
    """Normal noise without a memory, of the standard deviation `std`: a number, a schedule or a `Plateau`.

    Source: Fujimoto et al. 2018 (TD3), 6.1. Raises ValueError for a `std` that is ever below 0.
    """

    def __init__(self, std: float | Amount = 0.1) -> None:
        self.amount = _not_negative("GaussianNoise(std=...)", std)

    @property
    def config(self) -> dict[str, Any]:
        """What it was built with, as JSON."""
        return {"noise": "gaussian", "std": self.amount.config}

    def __call__(
        self, action_NA: Tensor, generator: torch.Generator, *, env_steps: int | None = None, updates: int | None = None
    ) -> Tensor:
        """Noise for these actions, of their shape; the counts are those that a schedule runs on."""
        return _normal(action_NA, generator).mul_(self.amount(env_steps=env_steps, updates=updates))

    def reset(self, mask_N: Tensor) -> None:
        """The environments in `mask_N` (N,) begin new episodes: nothing to forget."""

    def state_dict(self) -> dict[str, Any]:
        """That of its standard deviation, where it has one."""
        return _state_of(self.amount)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave."""
        _load_into(self.amount, state)


class OrnsteinUhlenbeck:
    """Noise that drifts: a random walk for each environment, drawn back to `mu`, where each episode begins.

    See `rein.ops.exploration.ornstein_uhlenbeck`. `sigma` is a number, a schedule or a `Plateau`. Raises ValueError for
    a `sigma` that is ever below 0, and for a `theta` not in [0, 1].
    """

    def __init__(self, theta: float = 0.15, sigma: float | Amount = 0.2, mu: float = 0.0) -> None:
        if not 0.0 <= theta <= 1.0:
            raise ValueError(f"OrnsteinUhlenbeck(theta={theta}): give a number from 0 to 1")
        self.theta = theta
        self.amount = _not_negative("OrnsteinUhlenbeck(sigma=...)", sigma)
        self.mu = mu
        self._state_NA: Tensor | None = None  # None until the first actions tell its shape

    @property
    def config(self) -> dict[str, Any]:
        """What it was built with, as JSON."""
        return {"noise": "ornstein_uhlenbeck", "theta": self.theta, "sigma": self.amount.config, "mu": self.mu}

    def __call__(
        self, action_NA: Tensor, generator: torch.Generator, *, env_steps: int | None = None, updates: int | None = None
    ) -> Tensor:
        """The next noise for these actions, of their shape; the counts are those that a schedule runs on."""
        state_NA = torch.full_like(action_NA, self.mu) if self._state_NA is None else self._state_NA
        if state_NA.shape != action_NA.shape:
            was, now = tuple(state_NA.shape), tuple(action_NA.shape)
            raise ValueError(f"OrnsteinUhlenbeck: actions were {was} before and are {now}; give each its own")
        sigma = self.amount(env_steps=env_steps, updates=updates)
        noise_NA = _normal(action_NA, generator)
        self._state_NA = ornstein_uhlenbeck(state_NA.to(action_NA.device), noise_NA, self.theta, self.mu, sigma)
        return self._state_NA.clone()  # which its caller may change

    def reset(self, mask_N: Tensor) -> None:
        """The environments in `mask_N` (N,) begin new episodes: their walks begin anew."""
        if self._state_NA is not None:
            self._state_NA = reset_noise(self._state_NA.to(mask_N.device), mask_N, self.mu)

    def state_dict(self) -> dict[str, Any]:
        """Where each walk is, and the state of `sigma`, where it has one."""
        return {"state": self._state_NA, **_state_of(self.amount)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` gave."""
        state_NA = state["state"]
        if state_NA is not None and state_NA.ndim < 2:
            raise ValueError(f"the state of OrnsteinUhlenbeck is (N, A), not {tuple(state_NA.shape)}")
        _load_into(self.amount, state)
        self._state_NA = None if state_NA is None else state_NA.clone()


ActionNoise = GaussianNoise | OrnsteinUhlenbeck


def as_noise(noise: ActionNoise | float) -> ActionNoise:
    """The noise as it is, and Gaussian noise of that standard deviation where it is a number or a schedule."""
    return noise if isinstance(noise, GaussianNoise | OrnsteinUhlenbeck) else GaussianNoise(noise)


def _normal(action_NA: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(action_NA.shape, generator=generator, dtype=action_NA.dtype, device=action_NA.device)


def _not_negative(name: str, value: float | Amount) -> Amount:
    amount = as_amount(value)
    if not amount.bounds[0] >= 0.0:
        raise ValueError(f"{name} goes down to {amount.bounds[0]}: stay at 0 or above")
    return amount


def _state_of(amount: Amount) -> dict[str, Any]:
    return {"amount": amount.state_dict()} if isinstance(amount, Plateau) else {}


def _load_into(amount: Amount, state: Mapping[str, Any]) -> None:
    if isinstance(amount, Plateau):
        amount.load_state_dict(state["amount"])


def random_action(space: spaces.Space[Any], observation: Tree, generator: torch.Generator) -> Tensor:
    """(N, ...) drawn uniformly from a Discrete space or a Box with finite bounds, for an observation (N, ...).

    Raises ValueError for other spaces, and for a Box whose high - low is not finite in float32.
    """
    rows, device = len(next(leaf for _, leaf in leaves(observation))), generator.device
    if isinstance(space, spaces.Discrete):
        first = int(space.start)
        return torch.randint(first, first + int(space.n), (rows,), generator=generator, device=device)
    if isinstance(space, spaces.Box) and np.isfinite(width(space)).all():
        low, high = (torch.as_tensor(bound, dtype=torch.float32, device=device) for bound in (space.low, space.high))
        return torch.lerp(
            low, high, torch.rand((rows, *space.shape), generator=generator, dtype=torch.float32, device=device)
        )
    raise ValueError(
        f"the action space is {space}; random actions come from Discrete, or a Box with finite bounds, high - low"
        " finite in float32"
    )
