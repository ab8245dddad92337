"""Exceptions of rein, and checks of the names of keyword arguments and attributes.

Invalid arguments raise `ValueError` or `TypeError`. Hints for names of other libraries are in `rein.foreign_names`,
which is imported when an error is explained.

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

import abc
import contextlib
import functools
import importlib
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T", bound=type)


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
    except Exception:  # a custom class may raise anything
        message = ""
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


@contextlib.contextmanager
def optional_import(advice: str) -> Iterator[None]:
    """Context of imports of an extra. Their ImportError begins with `advice`, which states how to install it."""
    try:
        yield
    except ImportError as error:
        raise ImportError(f"{advice} ({error})") from error


def hints() -> Any:
    """Import `rein.foreign_names`."""
    return importlib.import_module("rein.foreign_names")


def refuse_unknown(caller: str, names: Iterable[str], option_names: Iterable[str], *, flags: bool = False) -> None:
    """Raise TypeError if a name is not in `option_names`, and name rein's option for it.

    With `flags` the names are written as on the command line, `--env-steps`.
    """
    if unknown := sorted({*names} - {*option_names}):
        raise TypeError(hints().unknown_option(caller, unknown[0], sorted(option_names), flags))


def check_keywords(function: F) -> F:
    """Decorator: a keyword argument that the function lacks raises a TypeError that names rein's keyword."""
    parameters = inspect.signature(function).parameters
    caller = function.__qualname__.removesuffix(".__init__")

    @functools.wraps(function)
    def checked(*args: Any, **keywords: Any) -> Any:
        if not keywords.keys() <= parameters.keys():
            refuse_unknown(caller, keywords, parameters.keys() - {"self"})
        return function(*args, **keywords)

    return checked  # type: ignore[return-value]  # has the signature of `function`


class UnknownAttributeError(AttributeError):
    """Raised for an attribute that a class lacks. Its text, which is made when it is read, names the alternative."""

    def __str__(self) -> str:
        cls, name, table = self.args
        return hints().missing_attribute(cls.__name__, name, table)


def explain(table: str) -> Callable[[T], T]:
    """Class decorator: reading an attribute that instances lack raises an error that names rein's alternative.

    `table` is the name of a dictionary of attributes and alternatives in `rein.foreign_names`.
    """

    def decorate(cls: T) -> T:
        def __getattr__(self: Any, name: str) -> Any:
            if hasattr(type(self), name):  # a property that raised AttributeError raises it again
                return object.__getattribute__(self, name)
            raise UnknownAttributeError(type(self), name, table)

        cls.__getattr__ = __getattr__  # type: ignore[attr-defined]
        return cls

    return decorate


class AgentMeta(abc.ABCMeta):
    """Metaclass of agents, which explains attributes that the class lacks, as `explain` does for instances."""

    def __getattr__(cls, name: str) -> Any:
        raise UnknownAttributeError(cls, name, "AGENT_METHODS")
