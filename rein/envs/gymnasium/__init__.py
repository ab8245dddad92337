"""Gymnasium: any environment of it, one by one with a seed for each episode, or as a vector environment of others."""

from rein.envs.gymnasium.adapter import GymnasiumEnvironment
from rein.envs.gymnasium.vector import GymnasiumVectorEnvironment

__all__ = ["GymnasiumEnvironment", "GymnasiumVectorEnvironment"]
