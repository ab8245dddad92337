"""Actions of which each is as likely as any.

Shapes: N environments.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from rein.networks.bounds import width
from rein.ops.trees import leaves
from rein.types import Tree


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
