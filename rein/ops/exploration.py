"""Actions from values, with the noise that exploration needs.

Shapes: N rows, A actions.
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
