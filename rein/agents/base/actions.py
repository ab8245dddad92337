"""In which type agents keep actions: that of their own, whoever chose them."""

from __future__ import annotations

from typing import Any

from gymnasium import spaces
from torch import Tensor

from rein.types import Tree


def as_own(action: Tree, space: spaces.Space[Any]) -> Tree:
    """What somebody else did, in the type of what an agent does itself: int64, or float32 in a floating-point Box.

    So all rows that are kept of a run are alike, whoever acted. What is of no such space is left as it is, and so are
    floating-point numbers that are to be discrete actions.
    """
    if not isinstance(action, Tensor):
        return action
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary):
        return action if action.is_floating_point() else action.long()
    return action.float() if isinstance(space, spaces.Box) and space.dtype.kind == "f" else action
