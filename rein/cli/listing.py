"""Recipes by name: the one place where names stand for things."""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
import pkgutil
import re
import sys
from collections.abc import Callable
from typing import Any

import rein.recipes
from rein.cli.output import say


def recipe_names() -> list[str]:
    """Return the names of all recipes: the modules of `rein.recipes` except `base` and `tasks`, with hyphens."""
    modules = (module.name for module in pkgutil.iter_modules(rein.recipes.__path__))
    return sorted(name.replace("_", "-") for name in modules if name not in ("base", "tasks"))


def find(name: str) -> Callable[..., Any]:
    """Return the function of a recipe, or of `module:function`. Raises ValueError with the closest name there is.

    The module may lie in the working directory, which is searched last. Only a name that the user gave may name one.
    """
    module_name, colon, function_name = name.partition(":")
    if not colon:
        names, plain = recipe_names(), name.replace("-", "_")
        if plain.replace("_", "-") not in names:
            raise ValueError(
                f"there is no recipe {name!r}; {_closest(name, names)} A function of your own is named "
                "my_module:make_loop"
            )
        module_name, function_name = f"rein.recipes.{plain}", plain
    elif os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name != module_name:  # it exists, and misses something itself
            raise
        raise ValueError(f"there is no module {module_name!r} to take {function_name!r} from") from None
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ValueError(f"{module_name} has no function {function_name!r}")
    return function


def _closest(name: str, names: list[str]) -> str:
    """Say which recipes a name may mean: the name of an algorithm or an environment finds all of its recipes."""
    plain = re.sub(r"-v\d+$", "", name.replace("_", "-").lower())
    parts = [recipe for recipe in names if recipe.startswith(f"{plain}-") or recipe.endswith(f"-{plain}")]
    near = [plain] if plain in names else parts or difflib.get_close_matches(plain, names, 1)
    return f"did you mean {' or '.join(map(repr, near))}?" if near else f"the recipes are {', '.join(names)}."


def show_recipes() -> None:
    """Print the recipes with the first line of what each says of itself."""
    from rich.table import Table

    table = Table("recipe", "what it trains", box=None, pad_edge=False, header_style="bold")
    for name in recipe_names():
        text = inspect.getdoc(find(name)) or ""
        table.add_row(name, text.splitlines()[0] if text else "")
    say(table)
    say("\nrein train RECIPE --help shows its options")
