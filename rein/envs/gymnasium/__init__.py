"""Adapters for Gymnasium: single environments, workers, and vector environments."""

from rein.envs.gymnasium.adapter import GymnasiumEnvironment
from rein.envs.gymnasium.vector import GymnasiumVectorEnvironment
from rein.envs.gymnasium.workers import GymnasiumWorkers

__all__ = ["GymnasiumEnvironment", "GymnasiumVectorEnvironment", "GymnasiumWorkers"]
