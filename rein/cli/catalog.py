"""Recipes by name and their listing, which imports no recipe and not torch."""

from __future__ import annotations

import ast
import difflib
import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import rein.recipes
from rein.cli.terminal import say
from rein.lazy import exports_of

_MODULES = exports_of("rein.recipes")  # name of each function -> its module


def recipe_names() -> list[str]:
    """Return the names of all recipes: those that `rein.recipes` exports, with hyphens."""
    return [name.replace("_", "-") for name in sorted(_MODULES) if name not in ("Builder", "recipe")]


def is_recipe(name: str) -> bool:
    """Return whether a recipe of rein has this name, with hyphens or underscores."""
    return name.replace("_", "-") in recipe_names()


def find(name: str) -> Callable[..., Any]:
    """Return the function of a recipe, or of `module:function`. The error for an unknown name suggests the closest.

    Pass only names that the user has typed, because importing a module runs its code.
    """
    module_name, colon, function_name = name.partition(":")
    if colon:
        return import_from(module_name, function_name)
    if not is_recipe(name):
        nearest = suggestion(name, recipe_names())
        raise ValueError(f"unknown recipe {name!r}; {nearest} For a custom function use my_module:make_loop")
    return getattr(rein.recipes, name.replace("-", "_"))


def import_from(module_name: str, name: str) -> Any:
    """Return the function or class `name` of a module that the user has typed.

    The working directory is searched last for modules.
    """
    search_working_directory()
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name != module_name:  # the module exists, but one of its imports fails
            raise
        raise ValueError(f"no module named {module_name!r}, which should contain {name!r}") from None
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"{module_name} has no function {name!r}")
    return function


def search_working_directory() -> None:
    """Search the working directory last for modules."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())


def suggestion(name: str, names: list[str]) -> str:
    """Return a suggestion for an unknown name. The name of an algorithm or an environment gives all its recipes."""
    plain = re.sub(r"-v\d+$", "", name.replace("_", "-").lower())
    parts = [one for one in names if one.startswith(f"{plain}-") or one.endswith(f"-{plain}")]
    near = [plain] if plain in names else parts or difflib.get_close_matches(plain, names, 1)
    return f"did you mean {' or '.join(map(repr, near))}?" if near else f"choose one of {', '.join(names)}."


def describe(name: str) -> str:
    """Return the first line of the docstring of a recipe, from the source of its module."""
    function_name = name.replace("-", "_")
    spec = importlib.util.find_spec(_MODULES[function_name])
    assert spec is not None and spec.origin is not None
    for node in ast.parse(Path(spec.origin).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef) and node.name == function_name:
            return (ast.get_docstring(node) or "").partition("\n")[0]
    raise LookupError(f"{spec.origin} has no function {function_name}")


def list_recipes() -> None:
    """List the recipes with their descriptions."""
    from rich.table import Table

    table = Table("recipe", "description", box=None, pad_edge=False, header_style="bold")
    for name in recipe_names():
        table.add_row(name, describe(name))
    say(table)
    say("\nrein train RECIPE --help lists the options of a recipe")
