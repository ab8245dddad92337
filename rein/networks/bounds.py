"""How far apart the bounds of a Box are for networks, which calculate with float32.

Shapes: A the numbers of one action, in the space's shape.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces


def width(space: spaces.Box) -> np.ndarray[Any, np.dtype[np.float32]]:
    """high - low (*A): not finite where float32 has no such number, 0 where it has the same one for both bounds."""
    with np.errstate(over="ignore", invalid="ignore"):
        return space.high.astype(np.float32) - space.low.astype(np.float32)


def has_width(space: spaces.Box) -> bool:
    """Whether actions can be mapped to [-1, 1] and back: finite bounds, low < high, high - low finite, in float32."""
    width_A = width(space)
    return bool((np.isfinite(width_A) & (width_A > 0.0)).all())
