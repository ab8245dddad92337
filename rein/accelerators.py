"""Registry of accelerators: faster ways to compute the same results up to rounding.

`find` returns what the package `rein.accelerate` has for a kind and its arguments. It returns None with `REIN_PLAIN=1`
in the environment, without the package, and if nothing is faster. The caller then computes in the ordinary way.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable
from typing import Any

PLAIN = os.environ.get("REIN_PLAIN", "0") not in ("", "0")  # whether no accelerators are used

_finders: dict[str, Callable[..., Any]] = {}  # by kind


def register(finder: Callable[..., Any]) -> Callable[..., Any]:
    """Register a function, whose name is the kind: it returns an accelerator for its arguments, or None."""
    _finders[finder.__name__] = finder
    return finder


def find(kind: str, *arguments: Any) -> Any:
    """Return the accelerator of a kind for these arguments, or None."""
    return None if PLAIN or not _is_loaded() else _finders[kind](*arguments)


@functools.cache
def _is_loaded() -> bool:
    """Import `rein.accelerate`, which registers its accelerators. Returns False without it."""
    try:
        importlib.import_module("rein.accelerate")
    except ModuleNotFoundError as error:
        if error.name != "rein.accelerate":
            raise
        return False
    return True
