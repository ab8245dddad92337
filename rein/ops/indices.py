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


def sequence_minibatches(length: int, num_envs: int, count: int, generator: torch.Generator) -> Tensor:
    """Minibatches of whole sequences, in order of time: whole environments; (M, T, N // M) int64.

    The numbers are those of rows in (T, N) data that is seen as (T * N): row t of environment n is t * N + n, so
    `data_TN.flatten(0, 1)[index[m]]` is minibatch m, time-major, and `index[m, 0]` are its environments. Environments
    are drawn, and left out, as the rows in `minibatches`.
    """
    environment_MN = minibatches(num_envs, count, generator)
    step_T = torch.arange(length, device=generator.device)
    return environment_MN.unsqueeze(1) + num_envs * step_T.view(1, -1, 1)
