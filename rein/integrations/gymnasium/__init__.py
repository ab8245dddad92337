"""Gymnasium: any environment of it, one by one with a seed for each episode, or as a vector environment of others."""

from rein.integrations.gymnasium.environment import GymnasiumEnvironment
from rein.integrations.gymnasium.vector import GymnasiumVectorEnvironment

__all__ = ["GymnasiumEnvironment", "GymnasiumVectorEnvironment"]
