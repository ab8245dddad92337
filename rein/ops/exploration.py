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
    u_N = torch.rand(rows, generator=generator, device=device)
    random_N = torch.randint(actions, (rows,), generator=generator, device=device)
    return torch.where(u_N < epsilon, random_N, value_NA.argmax(dim=-1))
