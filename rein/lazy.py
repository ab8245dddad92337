"""Lazy exports: a package imports a module when one of the names that it exports is first used.

The exported names of a package are the imports in its stub `__init__.pyi`, which editors and type checkers read too.

Importing rein imports neither torch nor a module that a file in the working directory could replace: `python -m rein`
has the working directory on its path until `rein.__main__` has removed it. This module imports almost nothing.
"""

import gc
import importlib
import sys

ModuleType = type(sys)


def export(package: str) -> None:
    """Make the names in the stub of `package` its attributes. Call it in the `__init__` of the package."""
    module = sys.modules[package]
    module.__dict__["_exports"] = _read_stub(package, module.__path__[0])
    module.__class__ = _LazyPackage


def exports_of(package: str) -> dict[str, str]:
    """Return the names that a package exports, with the modules that define them, which are not imported."""
    return importlib.import_module(package).__dict__["_exports"]


def _read_stub(package: str, folder: str) -> dict[str, str]:
    """Return the module of each name that a stub imports, as in `from rein.agents.ppo import PPO as PPO`."""
    exports = {}
    with open(f"{folder}/__init__.pyi", encoding="utf-8") as stub:
        for line in stub:
            words = line.split()
            if words[:1] != ["from"]:
                continue
            _, module, _, name, *_ = words
            if name == "*":  # all names of a subpackage
                exports |= _read_stub(module, folder + module.removeprefix(package).replace(".", "/"))
            else:
                exports[name] = module
    return exports


class _LazyPackage(ModuleType):
    """Package whose exported names are imported when they are first used."""

    _exports: dict[str, str]

    def __getattr__(self, name: str) -> object:
        if name not in self._exports:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}{self._suggestion(name)}")
        # Importing torch creates about 180,000 permanent objects. Without garbage collection it is 11% faster.
        collects = gc.isenabled()
        gc.disable()
        try:
            module = self._exports[name]
            if module == self.__name__:  # a subpackage: `from rein import agents as agents`
                value = importlib.import_module(f"{module}.{name}")
            else:
                value = getattr(importlib.import_module(module), name)
        finally:
            if collects:
                gc.enable()
        self.__dict__[name] = value
        return value

    def __setattr__(self, name: str, value: object) -> None:
        """Keep an exported name if a module of the same name is imported, as `rein.handlers.checkpoint` is."""
        if not (isinstance(value, ModuleType) and self._exports.get(name, self.__name__) != self.__name__):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*self._exports, *(name for name in vars(self) if name.startswith("__"))})

    @property
    def __all__(self) -> list[str]:
        """Names for a star import: without the subpackages, which share names with modules of the standard library."""
        return sorted(name for name, module in self._exports.items() if module != self.__name__)

    def _suggestion(self, name: str) -> str:
        import difflib

        instead = importlib.import_module("rein.foreign_names").EXPORTS
        if name in instead:
            return f"; use {instead[name]}"
        for part in ("handlers", "envs", "errors", "schedules", "options") if self.__name__ == "rein" else ():
            value = getattr(importlib.import_module(f"rein.{part}"), name, None)
            if getattr(value, "__module__", "").startswith("rein."):  # not a module that it imports
                return f"; use rein.{part}.{name}"
        names = {exported.lower(): exported for exported in self._exports}
        near = difflib.get_close_matches(name.lower(), names, 1)
        return f"; did you mean {self.__name__}.{names[near[0]]}?" if near else ""
