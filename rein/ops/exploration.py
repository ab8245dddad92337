"""Exploration: epsilon-greedy and Boltzmann actions, Ornstein-Uhlenbeck noise.

Shapes: N rows or environments, A actions or dimensions of an action.
"""

from __future__ import annotations

import torch
from torch import Tensor


def epsilon_greedy(value_NA: Tensor, epsilon: float | Tensor, generator: torch.Generator) -> Tensor:
    """A random action with probability `epsilon`, else the first of the best; (N,) int64.

    Always draws the same amount from `generator`, whatever `epsilon` is, so a stream's position tells no lies about it.

    Source: Sutton & Barto 2018, 2.2.
    """
    (rows, actions), device = value_NA.shape, value_NA.device
    u_N = torch.rand(rows, generator=generator, dtype=torch.float32, device=device)
    random_N = torch.randint(actions, (rows,), generator=generator, device=device)
    return torch.where(u_N < epsilon, random_N, value_NA.argmax(dim=-1))


def boltzmann(value_NA: Tensor, temperature: float | Tensor, generator: torch.Generator) -> Tensor:
    """An action with the probability that a softmax of the values gives it; (N,) int64.

        P(a) = exp(Q(a) / temperature) / sum over a' of exp(Q(a') / temperature)

    It is the first of the largest of Q(a) + temperature * g(a), with g drawn from Gumbel's distribution: so a
    temperature of 0 takes the first of the best, and none is too small. An action whose value is -infinity is never
    taken while there is another. Always draws the same amount from `generator`.

    Source: Sutton & Barto 2018, 2.8 and 13.1; Maddison et al. 2014 ("A* sampling"), section 2.
    """
    u_NA = torch.rand(value_NA.shape, generator=generator, device=value_NA.device, dtype=torch.float64)
    gumbel_NA = u_NA.clamp_(min=torch.finfo(u_NA.dtype).tiny).log_().neg_().log_().neg_()
    return (value_NA + temperature * gumbel_NA).argmax(dim=-1)


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
