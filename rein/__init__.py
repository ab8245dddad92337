"""Reinforcement learning as one small, event-driven loop, with trajectories in HDF5 files that plot themselves.

The public names are in `__init__.pyi`. Each is imported when it is first used.
"""

from rein.lazy import export

__version__ = "0.1.0.dev0"

export(__name__)
