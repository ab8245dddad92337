"""Noise for the actions of continuous agents, each kind with one way to be asked for it.

Shapes: N environments, A dimensions of an action.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rein.learning.exploration import Amount, Plateau, as_amount
from rein.ops.noise import ornstein_uhlenbeck, reset_noise


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

    See `rein.ops.noise.ornstein_uhlenbeck`. `sigma` is a number, a schedule or a `Plateau`. Raises ValueError for a
    `sigma` that is ever below 0, and for a `theta` not in [0, 1].
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
