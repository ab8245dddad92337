"""Checks whether an environment can be reset or stepped."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

from rein.errors import text_of

CLOSED = "closed"  # value of `_ended` of an environment

_Method = TypeVar("_Method", bound=Callable[..., Any])


def ends_episodes(method: _Method) -> _Method:
    """Decorator of a method that steps or resets environments one by one: after an exception, `reset` must be called.

    Some of the environments may have been stepped, and would be stepped twice. The attribute `_ended` of the object
    becomes the text of the exception.
    """

    @functools.wraps(method)
    def guarded(self: Any, *args: Any) -> Any:
        try:
            return method(self, *args)
        except BaseException as error:  # raised again
            self._ended = text_of(error)
            raise

    return cast(Any, guarded)  # type checkers see the method


def check_open(name: str, method: str, ended: str | None) -> None:
    """Raise RuntimeError if an environment is closed. `ended` is its attribute, see `ends_episodes`."""
    if ended is CLOSED:
        raise RuntimeError(f"{name}: the environment is closed, so {method}() cannot be called; build a new one")


def check_begun(name: str, method: str, begun: bool, ended: str | None) -> None:
    """Raise RuntimeError if an environment cannot be stepped. `ended` is its attribute, see `ends_episodes`."""
    check_open(name, method, ended)
    if not begun or ended is not None:
        reason = "" if ended is None else f"; its episodes ended with an error ({ended})"
        raise RuntimeError(f"{name}: call reset() before {method}(){reason}")
