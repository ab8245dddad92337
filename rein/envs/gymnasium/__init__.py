"""Adapters for Gymnasium: single environments with one seed per episode, and vector environments."""

from rein.envs.gymnasium.adapter import GymnasiumEnvironment
from rein.envs.gymnasium.vector import GymnasiumVectorEnvironment

__all__ = ["GymnasiumEnvironment", "GymnasiumVectorEnvironment"]
