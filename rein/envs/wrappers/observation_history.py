"""The last observations as a window of feature vectors.

Shapes: L observations in a window, F features of one.
"""

from __future__ import annotations

from rein.envs.wrappers.flatten_observation import FlattenObservation
from rein.envs.wrappers.frame_stack import FrameStack
from rein.protocols import Environment


def observation_history(environment: Environment, length: int) -> FrameStack:
    """Observations as windows (L, F) float32: the last `length` of them, flattened, oldest first.

    At an episode's start the window is its first observation `length` times. The transition that an agent records is
    (window ending in s_t, a_t, r_t, window ending in s_t+1). It is `FrameStack` around `FlattenObservation`.
    """
    return FrameStack(FlattenObservation(environment), length)
