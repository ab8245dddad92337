"""Which recipe a run is, and with which options: a part of its loop, so that it stands in `run.json`."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from rein.cli.listing import recipe_names
from rein.errors import StoreError
from rein.files import read_json


@attrs.frozen
class Recipe:
    """The name of a recipe, the values of all its options, and the flags that were given."""

    name: str
    options: Mapping[str, Any]
    given: list[str] = attrs.field(factory=list)

    @property
    def config(self) -> dict[str, Any]:
        """All of it as JSON; what JSON has no word for is left to the recipe's default."""
        options = {key: _plain(value) for key, value in self.options.items()}
        kept = {key: value for key, value in options.items() if value is not _plain}
        return {"name": self.name, "options": kept, "given": list(dict.fromkeys(self.given))}


def of_run(path: Path, named: str | None = None) -> Recipe:
    """Return the recipe of the run in a folder, and the options in its `run.json`.

    Raises StoreError if `run.json` cannot be read or names none, and ValueError if it names one that is not rein's own
    and the user has not `named` the recipe.
    """
    file = path / "run.json"
    try:
        config = read_json(file)["parts"]["recipe"]["config"]
        name, options, given = config["name"], config["options"], config["given"]
        if not (isinstance(name, str) and isinstance(options, dict) and isinstance(given, list)):
            raise TypeError("a name, options and flags were expected")
    except OSError as error:
        raise StoreError(f"{file}: cannot be read, so there is no run to resume: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise StoreError(
            f"{file}: does not say by which recipe it was begun, so resume it in Python: {error}"
        ) from error
    if named is None and name.replace("_", "-") not in recipe_names():
        raise ValueError(
            f"{file}: names the recipe {name!r:.200}, which is not one of rein's own, and no file chooses which code "
            f"runs; name it yourself: rein resume {shlex.quote(str(path))} my_module:make_loop"
        )
    return Recipe(named or name, options, [word for word in given if isinstance(word, str)])


def _plain(value: Any) -> Any:
    """The value as JSON; this function itself where there is none."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, list | tuple):
        items = [_plain(item) for item in value]
        return _plain if _plain in items else items
    return _plain
