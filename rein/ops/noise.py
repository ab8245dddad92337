"""Noise that remembers: what makes a continuous agent try a direction for a while.

Shapes: N environments, A dimensions of an action.
"""

from __future__ import annotations

import torch
from torch import Tensor


def ornstein_uhlenbeck(
    state_NA: Tensor, noise_NA: Tensor, theta: float, mu: float | Tensor, sigma: float | Tensor
) -> Tensor:
    """The next state (N, A) of a random walk that is drawn back to `mu`, given normal noise (N, A).

        x' = x + theta * (mu - x) + sigma * noise

    A step of unit time, as in the second source. Without noise, that is where `sigma` is 0, the process stands still:
    x' = x; `theta` does not draw it back either.

    Source: Uhlenbeck & Ornstein 1930; Lillicrap et al. 2016 ("Continuous control with deep reinforcement learning"), 7.
    """
    sigma = torch.as_tensor(sigma, dtype=state_NA.dtype, device=state_NA.device)
    moved_NA = state_NA + theta * (mu - state_NA) + sigma * noise_NA
    return torch.where(sigma == 0.0, state_NA, moved_NA)


def reset_noise(state_NA: Tensor, mask_N: Tensor, mu: float | Tensor) -> Tensor:
    """The state (N, A) with the environments in `mask_N` (N,) back at `mu`; actions may have more dimensions."""
    return torch.where(mask_N.view(-1, *[1] * (state_NA.ndim - 1)), mu, state_NA)
