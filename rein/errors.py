"""The errors that rein raises itself; everything else is Python's own `ValueError` and `TypeError`.

ReinError
  StoreError                    a file of a run is missing, damaged, hostile or cannot be written
    CheckpointError             the same, of a checkpoint
  WorkerDied                    an environment's process ended by itself
  WorkerTimeout                 an environment's process did not answer in time
  EnvironmentContractError      an environment returned what the contract does not allow
  NonFiniteError                NaN or infinity where a number was promised
"""


class ReinError(Exception):
    """Base of all errors that are rein's own."""


class StoreError(ReinError):
    """A file of a run is missing, damaged, hostile or cannot be written; says which file and why."""


class CheckpointError(StoreError):
    """A checkpoint cannot be written, read, or does not fit the objects it is loaded into."""


class WorkerDied(ReinError):
    """The process of an environment ended by itself; says which worker, its seed and how it ended."""


class WorkerTimeout(ReinError):
    """The process of an environment did not answer in time; says which worker and for how long."""


class EnvironmentContractError(ReinError):
    """An environment returned what the contract does not allow; says what, in which field and row."""


class NonFiniteError(ReinError):
    """NaN or infinity where a number was promised; says where it was seen first."""
