"""The bounds of actions, as tensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from rein.protocols import Environment


def action_bounds(wrapper: str, environment: Environment) -> tuple[spaces.Box, Tensor, Tensor]:
    """The environment's action space with its least and greatest action (*A).

    Raises TypeError for a space that is no Box of floating-point numbers.
    """
    space: spaces.Space[Any] = environment.single_action_space
    if not isinstance(space, spaces.Box) or not np.issubdtype(space.dtype, np.floating):
        raise TypeError(f"{wrapper}: actions in {space}; they must be a Box of floating-point numbers")
    low, high = (
        torch.tensor(bound, dtype=torch.float32, device=environment.device) for bound in (space.low, space.high)
    )
    return space, low, high
