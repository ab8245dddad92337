"""Exceptions of rein. Invalid arguments raise `ValueError` or `TypeError`.

Hierarchy::

    ReinError
      StoreError                    a file of a run is missing, damaged or hostile, or cannot be written
        CheckpointError             a checkpoint cannot be written, read or loaded
      WorkerError                   a worker that steps environments failed
        WorkerDied                  its process ended unexpectedly
        WorkerTimeout               it did not answer in time
      EnvironmentContractError      an environment returned invalid data
      NonFiniteError                a value is NaN or infinite
"""

from __future__ import annotations

from typing import Any


class ReinError(Exception):
    """Base class of the exceptions of rein."""


class StoreError(ReinError):
    """Raised if a file of a run is missing, damaged or hostile, or cannot be written. The message names the file."""


class CheckpointError(StoreError):
    """Raised if a checkpoint cannot be written or read, or does not fit the objects that load it."""


class WorkerError(ReinError):
    """Raised if a worker that steps environments fails. The message names the worker and the environment.

    Attributes:
        environment: index of the environment that was stepped or reset; None if there was none.
        episode_seed: seed of its episode, or None.
        action: its last action, as numbers, lists and dictionaries, or None.
        pid: process id of the worker; None for a thread.
        exitcode: exit code of the process; negative for a signal, None for a thread or if it did not end.
    """

    def __init__(
        self,
        message: str = "",
        *,
        environment: int | None = None,
        episode_seed: int | None = None,
        action: Any = None,
        pid: int | None = None,
        exitcode: int | None = None,
    ) -> None:
        super().__init__(message)
        self.environment, self.episode_seed, self.action = environment, episode_seed, action
        self.pid, self.exitcode = pid, exitcode


class WorkerDied(WorkerError):
    """Raised if the process of an environment ends unexpectedly. The message names the worker and its seed."""


class WorkerTimeout(WorkerError):
    """Raised if a worker of an environment does not answer in time. The message names the worker and the time."""


class EnvironmentContractError(ReinError):
    """Raised if an environment returns invalid data. The message names the field and the row."""


class NonFiniteError(ReinError):
    """Raised if a value is NaN or infinite. The message names the first place where it was found."""


def text_of(error: BaseException) -> str:
    """Return type and message of an exception. The message is left out if `__str__` of a custom class raises."""
    try:
        message = str(error)
    except Exception:
        message = ""
    return f"{type(error).__name__}: {message}" if message else type(error).__name__
