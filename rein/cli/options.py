"""The options of a run: a recipe's own parameters, and those that every recipe takes, as flags."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_type_hints

import tyro


def common(
    run: Path | None = None,
    epochs: int | None = None,
    iterations: int | None = None,
    env_steps: int | None = None,
    threads: int = 1,
    checkpoint_every: int | None = None,
    resume: bool = False,
    quiet: bool = False,
    debug: bool = False,
) -> None:
    """What every recipe takes.

    Args:
        run: the run's folder; a fresh name under runs/ by default.
        epochs: epochs at most.
        iterations: steps of every environment in an epoch.
        env_steps: end the run when the environments have taken so many steps in all.
        threads: threads that torch computes with; for small networks one is fastest.
        checkpoint_every: epochs from one checkpoint to the next; by default one about every 30 seconds. 0 saves at the
            end only.
        resume: go on with the run in the folder --run from its last checkpoint; begin it where there is none.
        quiet: no progress display.
        debug: give the traceback of an error.
    """


def parse(
    recipe: Callable[..., Any], program: str, words: list[str], before: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The values of all options: the recipe's own parameters and the common ones that it does not have itself.

    `before` are values from a `run.json`, which stand where `words` give no other.
    """
    own = dict(inspect.signature(recipe).parameters)
    own.pop("store", None)
    shared = {k: p for k, p in inspect.signature(common).parameters.items() if k not in own}
    parameters = {k: p.replace(kind=p.KEYWORD_ONLY) for k, p in (own | shared).items()}
    for key, value in (before or {}).items():
        if key in parameters:
            parameters[key] = parameters[key].replace(default=_as(value, parameters[key].default))
    hints = {**get_type_hints(common), **get_type_hints(recipe)}

    def options(**values: Any) -> dict[str, Any]:
        return values

    options.__signature__ = inspect.Signature(list(parameters.values()))
    options.__annotations__ = {key: hints.get(key, type(p.default)) for key, p in parameters.items()}
    options.__doc__ = _document(recipe, shared)
    return tyro.cli(options, prog=program, args=words)


def _as(value: Any, default: Any) -> Any:
    """A value from JSON as the kind of thing that the default is."""
    if isinstance(default, tuple) and isinstance(value, list):
        return tuple(value)
    return Path(value) if isinstance(default, Path) and isinstance(value, str) else value


def _document(recipe: Callable[..., Any], shared: Mapping[str, Any]) -> str:
    """The recipe's docstring with the help of the common options added, as the parser of flags reads it."""
    mine, theirs = inspect.getdoc(recipe) or "Run it.", (inspect.getdoc(common) or "").partition("Args:\n")[2]
    lines, wanted = [], False
    for line in theirs.splitlines():
        if not line.startswith("     "):  # a new option, not more text of the one before
            wanted = line.strip().partition(":")[0] in shared
        lines += [line] * wanted
    return "\n".join([mine if "Args:" in mine else f"{mine}\n\nArgs:", *lines])
