"""Exploration: epsilon-greedy and Boltzmann actions, Ornstein-Uhlenbeck noise.

Shapes: N rows or environments, A actions or dimensions of an action.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rein.ops.values import mask_values, nonempty_mask


def epsilon_greedy(
    value_NA: Tensor, epsilon: float | Tensor, generator: torch.Generator, mask_NA: Tensor | None = None
) -> Tensor:
    """Return a random action with probability `epsilon`, else the first of the best actions; (N,) int64.

    Only actions in the boolean mask are taken; a row without a valid action counts as unmasked. The number of draws
    from `generator` does not depend on `epsilon`.

    Source: Sutton & Barto 2018, 2.2.
    """
    (rows, actions), device = value_NA.shape, value_NA.device
    u_N = torch.rand(rows, generator=generator, dtype=torch.float32, device=device)
    if mask_NA is None:
        random_N = torch.randint(actions, (rows,), generator=generator, device=device)
    else:
        random_N = random_valid(mask_NA, generator)
    return torch.where(u_N < epsilon, random_N, mask_values(value_NA, mask_NA).argmax(dim=-1))


def random_valid(mask_NA: Tensor, generator: torch.Generator) -> Tensor:
    """Draw one valid action of each row uniformly, or any action if none is valid; (N,) int64.

    The boolean mask may have further dimensions before A. Each row takes one random number.
    """
    mask_NA = nonempty_mask(mask_NA)
    before_NA = mask_NA.cumsum(-1)
    u_N = torch.rand(mask_NA.shape[:-1], generator=generator, dtype=torch.float64, device=mask_NA.device)
    order_N1 = (u_N * before_NA[..., -1]).floor_().unsqueeze(-1)  # less than the number of valid actions
    return (before_NA <= order_N1).sum(-1)


def boltzmann(
    value_NA: Tensor, temperature: float | Tensor, generator: torch.Generator, mask_NA: Tensor | None = None
) -> Tensor:
    """Sample actions from a softmax of the values (Boltzmann exploration); (N,) int64.

    The probabilities are::

        P(a) = exp(Q(a) / temperature) / sum over a' of exp(Q(a') / temperature)

    The sample is the first argmax of Q(a) + temperature * g(a) with Gumbel noise g. A temperature of 0 therefore takes
    the first of the best actions, and very small temperatures are safe. An action with value -infinity is never taken
    if another action has a higher value. Only actions in the boolean mask are taken; a row without a valid action
    counts as unmasked. The number of draws from `generator` is constant.

    Source: Sutton & Barto 2018, 2.8 and 13.1; Maddison et al. 2014 ("A* sampling"), section 2.
    """
    u_NA = torch.rand(value_NA.shape, generator=generator, device=value_NA.device, dtype=torch.float64)
    gumbel_NA = u_NA.clamp_(min=torch.finfo(u_NA.dtype).tiny).log_().neg_().log_().neg_()
    return (mask_values(value_NA, mask_NA) + temperature * gumbel_NA).argmax(dim=-1)


def ornstein_uhlenbeck(
    state_NA: Tensor, noise_NA: Tensor, theta: float, mu: float | Tensor, sigma: float | Tensor
) -> Tensor:
    """Return the next state (N, A) of an Ornstein-Uhlenbeck process with mean `mu`, given standard normal noise (N, A).

    The process takes a step of unit time, as in the second source::

        x' = x + theta * (mu - x) + sigma * noise

    If `sigma` is 0, the state does not change: x' = x.

    Source: Uhlenbeck & Ornstein 1930; Lillicrap et al. 2016 ("Continuous control with deep reinforcement learning"), 7.
    """
    sigma = torch.as_tensor(sigma, dtype=state_NA.dtype, device=state_NA.device)
    moved_NA = state_NA + theta * (mu - state_NA) + sigma * noise_NA
    return torch.where(sigma == 0.0, state_NA, moved_NA)


def reset_noise(state_NA: Tensor, mask_N: Tensor, mu: float | Tensor) -> Tensor:
    """Return the state (N, A), reset to `mu` in the environments of `mask_N` (N,). Actions may have more dimensions."""
    return torch.where(mask_N.view(-1, *[1] * (state_NA.ndim - 1)), mu, state_NA)
