"""Parameters that follow others slowly."""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def polyak_(targets: list[Tensor], sources: list[Tensor], tau: float) -> None:
    """Move each target a part of the way to its source, in place; all of them in one operation.

        target <- target + tau * (source - target)

    `tau` = 1 copies to the last bit. Both hold floating-point tensors; copy counters and the like.

    Source: Polyak & Juditsky 1992 (averaging); Lillicrap et al. 2016, algorithm 1 (targets of a critic).

    Raises ValueError for lists of different lengths, and for a `tau` not in [0, 1].
    """
    if len(targets) != len(sources):
        raise ValueError(f"polyak_: {len(targets)} targets cannot follow {len(sources)} sources")
    if not 0.0 <= tau <= 1.0:
        raise ValueError(f"polyak_(tau={tau}): give a number from 0 (stay) to 1 (copy)")
    if not targets:
        return
    if tau == 1.0:  # whatever stands in the targets, even NaN
        torch._foreach_copy_(targets, sources)
    else:
        torch._foreach_lerp_(targets, sources, tau)
