"""Reinforcement learning as one small, event-driven loop, with trajectories in HDF5 files that plot themselves."""

from __future__ import annotations

import gc
import importlib
from typing import TYPE_CHECKING, Any

# Importing torch makes some 180,000 objects that stay; looking through them for garbage, again and again while there
# come more, is a ninth of the time that it takes.
_COLLECTS = gc.isenabled()
gc.disable()
try:
    from rein.errors import (
        CheckpointError,
        EnvironmentContractError,
        NonFiniteError,
        ReinError,
        StoreError,
        WorkerDied,
        WorkerTimeout,
    )
    from rein.loop import Loop
    from rein.rollout import Evaluation, batch_step, evaluate
    from rein.training import train, training_loop
    from rein.types import Episodes, State, StepState, TimeStep, Trajectory, Transition
finally:
    if _COLLECTS:
        gc.enable()

if TYPE_CHECKING:
    from rein.offline import fill, offline_loop
    from rein.saved import load_agent
    from rein.stores.checkpoints import Checkpoints
    from rein.stores.hdf5 import HDF5Store
    from rein.stores.memory import MemoryStore
    from rein.stores.parts import load, save
    from rein.stores.reader import open_run
    from rein.stores.resume import resume

__version__ = "0.1.0.dev0"

__all__ = [
    "CheckpointError",
    "Checkpoints",
    "EnvironmentContractError",
    "Episodes",
    "Evaluation",
    "HDF5Store",
    "Loop",
    "MemoryStore",
    "NonFiniteError",
    "ReinError",
    "State",
    "StepState",
    "StoreError",
    "TimeStep",
    "Trajectory",
    "Transition",
    "WorkerDied",
    "WorkerTimeout",
    "batch_step",
    "evaluate",
    "fill",
    "load",
    "load_agent",
    "offline_loop",
    "open_run",
    "resume",
    "save",
    "train",
    "training_loop",
]

# what brings h5py or much else with it is imported when it is first asked for
_LAZY = {
    "Checkpoints": "rein.stores.checkpoints",
    "HDF5Store": "rein.stores.hdf5",
    "MemoryStore": "rein.stores.memory",
    "fill": "rein.offline",
    "load": "rein.stores.parts",
    "load_agent": "rein.saved",
    "offline_loop": "rein.offline",
    "open_run": "rein.stores.reader",
    "resume": "rein.stores.resume",
    "save": "rein.stores.parts",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'rein' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
