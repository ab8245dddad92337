"""Which rows go into which minibatch.

Shapes: M minibatches, B rows, T steps in time, N environments.
"""

from __future__ import annotations

import torch
from torch import Tensor


def minibatches(rows: int, count: int, generator: torch.Generator) -> Tensor:
    """The numbers 0 to rows - 1 in random order, cut into `count` minibatches; (M, rows // M) int64.

    All minibatches have the same size. What is left over, fewer than `count` rows, is left out; which ones is random,
    so over several calls no row is preferred. Raises ValueError where that would leave a minibatch empty.
    """
    if not 1 <= count <= rows:
        raise ValueError(f"{rows} rows, or sequences, cannot be cut into {count} minibatches: give 1 to {rows}")
    size = rows // count
    return torch.randperm(rows, generator=generator, device=generator.device)[: count * size].view(count, size)
