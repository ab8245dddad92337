"""Exceptions of rein. Invalid arguments raise `ValueError` or `TypeError`.

Hierarchy::

    ReinError
      StoreError                    a file of a run is missing, damaged or hostile, or cannot be written
        CheckpointError             a checkpoint cannot be written, read or loaded
      WorkerDied                    the process of an environment ended unexpectedly
      WorkerTimeout                 the process of an environment did not answer in time
      EnvironmentContractError      an environment returned invalid data
      NonFiniteError                a value is NaN or infinite
"""


class ReinError(Exception):
    """Base class of the exceptions of rein."""


class StoreError(ReinError):
    """Raised if a file of a run is missing, damaged or hostile, or cannot be written. The message names the file."""


class CheckpointError(StoreError):
    """Raised if a checkpoint cannot be written or read, or does not fit the objects that load it."""


class WorkerDied(ReinError):
    """Raised if the process of an environment ends unexpectedly. The message names the worker and its seed."""


class WorkerTimeout(ReinError):
    """Raised if the process of an environment does not answer in time. The message names the worker and the time."""


class EnvironmentContractError(ReinError):
    """Raised if an environment returns invalid data. The message names the field and the row."""


class NonFiniteError(ReinError):
    """Raised if a value is NaN or infinite. The message names the first place where it was found."""
