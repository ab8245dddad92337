"""Recipes by name, their listing, and the entry of a recipe in `run.json`."""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
import pkgutil
import re
import shlex
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs

import rein.recipes
from rein.cli.output import say
from rein.errors import StoreError
from rein.files import read_json


def recipe_names() -> list[str]:
    """Return the names of all recipes: the modules of `rein.recipes` except `base` and `tasks`, with hyphens."""
    modules = (module.name for module in pkgutil.iter_modules(rein.recipes.__path__))
    return sorted(name.replace("_", "-") for name in modules if name not in ("base", "tasks"))


def find(name: str) -> Callable[..., Any]:
    """Return the function of a recipe, or of `module:function`. The error for an unknown name suggests the closest.

    The working directory is searched last for modules. Pass only names that the user has typed, because importing a
    module runs its code.
    """
    module_name, colon, function_name = name.partition(":")
    if not colon:
        names, plain = recipe_names(), name.replace("-", "_")
        if plain.replace("_", "-") not in names:
            raise ValueError(
                f"unknown recipe {name!r}; {_closest(name, names)} For a custom function use my_module:make_loop"
            )
        module_name, function_name = f"rein.recipes.{plain}", plain
    elif os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name != module_name:  # the module exists, but one of its imports fails
            raise
        raise ValueError(f"no module named {module_name!r}, which should contain {function_name!r}") from None
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ValueError(f"{module_name} has no function {function_name!r}")
    return function


def _closest(name: str, names: list[str]) -> str:
    """Return a suggestion for an unknown name. The name of an algorithm or an environment gives all its recipes."""
    plain = re.sub(r"-v\d+$", "", name.replace("_", "-").lower())
    parts = [recipe for recipe in names if recipe.startswith(f"{plain}-") or recipe.endswith(f"-{plain}")]
    near = [plain] if plain in names else parts or difflib.get_close_matches(plain, names, 1)
    return f"did you mean {' or '.join(map(repr, near))}?" if near else f"the recipes are {', '.join(names)}."


def show_recipes() -> None:
    """Print the recipes with the first lines of their docstrings."""
    from rich.table import Table

    table = Table("recipe", "description", box=None, pad_edge=False, header_style="bold")
    for name in recipe_names():
        text = inspect.getdoc(find(name)) or ""
        table.add_row(name, text.splitlines()[0] if text else "")
    say(table)
    say("\nrein train RECIPE --help lists the options of a recipe")


def call(recipe: Callable[..., Any], options: Mapping[str, Any], **arguments: Any) -> Any:
    """Call a recipe with these arguments and with those `options` that differ from their defaults."""
    parameters = inspect.signature(recipe).parameters
    return recipe(
        **arguments,
        **{key: value for key, value in options.items() if key in parameters and value != parameters[key].default},
    )


@attrs.frozen
class Recipe:
    """Part of a loop that records the name of its recipe, all option values and the given flags."""

    name: str
    options: Mapping[str, Any]
    given: list[str] = attrs.field(factory=list)
    source: str = "run.json"  # file that contains the options

    @property
    def config(self) -> dict[str, Any]:
        """Name, options and flags as JSON, without options that JSON cannot express, such as schedules."""
        options = {key: str(value) if isinstance(value, Path) else value for key, value in self.options.items()}
        kept = {
            key: list(value) if isinstance(value, tuple) else value
            for key, value in options.items()
            if _is_plain(value)
        }
        return {"name": self.name, "options": kept, "given": list(dict.fromkeys(self.given))}


def of_run(path: Path, named: str | None = None, command: str = "resume") -> Recipe:
    """Return the recipe of the run in a folder, with the options in its `run.json`.

    `command` is the command that uses it. Raises StoreError if `run.json` cannot be read or has no recipe. Raises
    ValueError if the recipe is not one of rein's and the user has not `named` it.
    """
    file, purpose = path / "run.json", "resumed" if command == "resume" else "repeated"
    try:
        config = read_json(file)["parts"]["recipe"]["config"]
        name, options, given = config["name"], config["options"], config["given"]
        if not (isinstance(name, str) and isinstance(options, dict) and isinstance(given, list)):
            raise TypeError("expected a name, options and flags")
    except OSError as error:
        raise StoreError(f"{file}: cannot be read, so the run cannot be {purpose}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        why = f"does not name the recipe of the run; the run can be {purpose} in Python"
        raise StoreError(f"{file}: {why}: {error}") from error
    if named is None:
        quoted = shlex.quote(str(path))
        words = f"{quoted} my_module:make_loop" if command == "resume" else f"my_module:make_loop --like {quoted}"
        refuse_code(file, name, f"rein {command} {words}")
    return Recipe(named or name, options, [word for word in given if isinstance(word, str)])


def refuse_code(file: Path, name: str, command: str) -> None:
    """Raise ValueError if the recipe `name` in a file is not one of rein's. `command` names it on the command line."""
    if name.replace("_", "-") not in recipe_names():
        raise ValueError(
            f"{file}: the recipe {name!r:.200} is not part of rein, and its code is not run because a file names it; "
            f"name it on the command line: {command}"
        )


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)
