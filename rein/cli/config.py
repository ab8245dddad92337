"""Configuration files: the name of a recipe and its options, as TOML."""

from __future__ import annotations

import inspect
import json
import tomllib
from pathlib import Path
from typing import Any

from rein.cli.options import LIMITS, common
from rein.cli.plan import take
from rein.cli.recipes import Recipe, find, of_run, refuse_code
from rein.errors import refuse_unknown
from rein.files import check_depth, followed, read_file
from rein.foreign_names import written

FILE = "config.toml"  # in the folder of a run
_TYPED = ("run", "resume", "quiet", "debug")  # options that a file cannot set
_LARGEST = 64 << 10  # bytes of a file
_DOTS = 256  # in a line, because the parser takes quadratic time and memory for a dotted key
_DEEPEST = 16  # levels of tables and lists


def config_of(recipe: Recipe) -> bytes:
    """Return the recipe and its options as TOML that `read_config` accepts.

    Limits that were not given, `epochs` or `env_steps`, are left out, because a limit in a file counts as given, and so
    are options that `param` gives.
    """
    options = recipe.config["options"]
    left_out = {name for name in LIMITS if written(name, True) not in recipe.given}
    left_out |= {text.partition("=")[0].strip().replace("-", "_") for text in options.get("param", ())}
    options = {name: value for name, value in options.items() if name not in left_out}
    lines = [f"{name} = {_toml(value)}\n" for name, value in {"recipe": recipe.name, **options}.items()]
    return "".join(lines).encode(errors="replace")


def read_config(path: Path, named: str | None = None, command: str = "train") -> Recipe:
    """Read a configuration file. The recipe is the `named` one, or that of the file, which must be one of rein's.

    Raises OSError or ValueError if the file cannot be read, is not TOML or names no recipe, and TypeError for an
    unknown option.
    """
    options = _read_options(path)
    name = options.pop("recipe", None)
    if named is None and not isinstance(name, str):
        raise ValueError(f'{path}: names no recipe; add a line such as recipe = "cartpole", or name it before --config')
    if named is None:
        refuse_code(path, name, f"rein {command} my_module:make_loop --config {path}")
    recipe = find(named or name)
    if typed := [written(name, True) for name in _TYPED if name in options]:
        raise ValueError(f"{path}: {typed[0]} can only be given on the command line")
    known = {*inspect.signature(recipe).parameters, *inspect.signature(common).parameters, "param"} - {"store", *_TYPED}
    refuse_unknown(str(path), options, known)
    return Recipe(named or name, options, [written(name, True) for name in options], str(path))


def _read_options(path: Path) -> dict[str, Any]:
    """Return the options in a TOML file by their names in Python."""
    options: dict[str, Any] = {}
    try:
        text = read_file(followed(path), _LARGEST).decode()
        if max(line.count(".") for line in text.split("\n")) > _DOTS:
            raise ValueError(f"a line has more than {_DOTS} dots")
        found = tomllib.loads(text)
        check_depth(found, _DEEPEST)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: is not a TOML file of options: {error}") from error
    for name, value in found.items():
        if (option := name.replace("-", "_")) in options:
            raise ValueError(f"{path}: {option} is given twice, also as {option.replace('_', '-')}; remove one of them")
        options[option] = value
    return options


def read_source(words: list[str], named: str | None, command: str) -> tuple[Recipe | None, list[str]]:
    """Remove `--config FILE` or `--like RUN` from `words`. Returns the options there, and the removed words."""
    file, run = take(words, "--config"), take(words, "--like")
    if file is not None and run is not None:
        raise ValueError(f"rein {command} --config {file} --like {run}: give one of the two")
    if file is not None:
        return read_config(Path(file).expanduser(), named, command), ["--config", file]
    if run is not None:
        return of_run(Path(run).expanduser(), named, command), ["--like", run]
    return None, []


def _toml(value: Any) -> str:
    """Return a value of a flat table as TOML, which has no None: it is written as the text on the command line."""
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, float):
        return repr(value)
    text = json.dumps("None" if value is None else value, ensure_ascii=False)
    return text.replace("\x7f", "\\u007f")  # TOML has no other rules for texts than JSON
