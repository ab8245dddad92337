"""Lazy exports: a package imports the module of a name when the name is first used."""

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def exports(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package that exports names lazily.

    Args:
        package: name of the package.
        modules: the module that defines each name.
    """

    def load(name: str) -> Any:
        if name not in modules:
            import difflib

            near = difflib.get_close_matches(name, modules, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise AttributeError(f"module {package!r} has no attribute {name!r}{hint}")
        value = getattr(importlib.import_module(modules[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return load
