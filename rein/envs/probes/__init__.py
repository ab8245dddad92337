"""Probes: environments so small that the right answer is known, each of which tells one thing about an algorithm."""

from rein.envs.probes.bandit import Bandit
from rein.envs.probes.corridor import Corridor
from rein.envs.probes.fork import Fork
from rein.envs.probes.memory import Memory
from rein.envs.probes.reach import Reach
from rein.envs.probes.values import ConstantReward, DelayedReward, ObservedReward

__all__ = ["Bandit", "ConstantReward", "Corridor", "DelayedReward", "Fork", "Memory", "ObservedReward", "Reach"]
