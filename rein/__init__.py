"""Reinforcement learning with a small event-driven loop, and trajectories in HDF5 files with built-in plots.

The public names are in `__init__.pyi`. Each is imported when it is first used.
"""

from rein import lazy

__version__ = "0.1.0"

lazy.export(__name__)
