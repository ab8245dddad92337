"""Reinforcement learning as one small, event-driven loop, with trajectories in HDF5 files that plot themselves."""

# Importing rein imports neither torch nor a file that the working directory could replace: `python -m rein` has the
# working directory on its path until `rein.__main__` has removed it. That is why there is no import of `typing` here.
import gc
import importlib

TYPE_CHECKING = False
if TYPE_CHECKING:
    from rein.episodes import Evaluation, batch_step, evaluate
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
    from rein.loop.state import State
    from rein.store.checkpoints import Checkpoints
    from rein.store.hdf5 import HDF5Store
    from rein.store.memory import MemoryStore
    from rein.store.parts import load, save
    from rein.store.reader import open_run
    from rein.store.resume import resume
    from rein.training.offline import fill, offline_loop
    from rein.training.saved_agents import load_agent
    from rein.training.training_loop import train, training_loop
    from rein.types import Episodes, StepState, TimeStep, Trajectory, Transition

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

_WHERE = {  # the module that defines each name, imported when the name is first used
    "rein.errors": (
        "CheckpointError",
        "EnvironmentContractError",
        "NonFiniteError",
        "ReinError",
        "StoreError",
        "WorkerDied",
        "WorkerTimeout",
    ),
    "rein.loop": ("Loop",),
    "rein.training.offline": ("fill", "offline_loop"),
    "rein.episodes": ("Evaluation", "batch_step", "evaluate"),
    "rein.training.saved_agents": ("load_agent",),
    "rein.store.checkpoints": ("Checkpoints",),
    "rein.store.hdf5": ("HDF5Store",),
    "rein.store.memory": ("MemoryStore",),
    "rein.store.parts": ("load", "save"),
    "rein.store.reader": ("open_run",),
    "rein.store.resume": ("resume",),
    "rein.training.training_loop": ("train", "training_loop"),
    "rein.loop.state": ("State",),
    "rein.types": ("Episodes", "StepState", "TimeStep", "Trajectory", "Transition"),
}
_MODULES = {name: module for module, names in _WHERE.items() for name in names}
_SUBMODULES = ("episodes", "errors", "loop", "training", "types")  # `rein.errors` works without an import of its own


def __getattr__(name: str) -> object:
    if name not in _MODULES and name not in _SUBMODULES:
        raise AttributeError(f"module 'rein' has no attribute {name!r}{_hint(name)}")
    # Importing torch creates some 180,000 objects that stay. Collecting garbage meanwhile takes a ninth of the time.
    collects = gc.isenabled()
    gc.disable()
    try:
        module = importlib.import_module(_MODULES.get(name, f"rein.{name}"))
    finally:
        if collects:
            gc.enable()
    value = globals()[name] = module if name in _SUBMODULES else getattr(module, name)
    return value


def _hint(name: str) -> str:
    import difflib
    import importlib.util

    if not name.startswith("_") and importlib.util.find_spec(f"rein.agents.{name.lower()}"):
        return f"; write from rein.agents.{name.lower()} import {name}"
    near = difflib.get_close_matches(name, __all__, 1)
    return f"; did you mean rein.{near[0]}?" if near else ""


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
