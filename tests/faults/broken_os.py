"""Replacement of the module `os` in `rein.store.format.sealed` whose calls fail or end the process."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

CALLS = ("open", "write", "fsync", "close", "replace")

Fail = Callable[[str, Any, tuple[Any, ...]], Any]  # gets the name, function and arguments of a call


class BrokenOs:
    """Module `os` whose `at`-th call that changes the disk is replaced by `fail`, and all later ones if `for_good`."""

    def __init__(self, at: int, fail: Fail, names: tuple[str, ...] = CALLS, for_good: bool = False) -> None:
        self.calls, self.at, self.fail, self.names, self.for_good = 0, at, fail, names, for_good

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name not in self.names:
            return real

        def call(*arguments: Any, **options: Any) -> Any:
            self.calls += 1
            if self.calls == self.at or (self.for_good and self.calls > self.at):
                return self.fail(name, real, arguments)
            return real(*arguments, **options)

        return call


def raises(code: int) -> Fail:
    """Return a function that raises an OSError."""

    def fail(name: str, real: Any, arguments: tuple[Any, ...]) -> Any:
        if name == "close":  # Linux closes the descriptor before it reports the error
            real(*arguments)
        raise OSError(code, os.strerror(code))

    return fail


def dies(name: str, real: Any, arguments: tuple[Any, ...]) -> None:
    """Kill the process, in the middle of a write."""
    if name == "write":
        os.write(arguments[0], arguments[1][: len(arguments[1]) // 2])
    os.kill(os.getpid(), signal.SIGKILL)
