"""The options of a run: a recipe's own parameters, and those that every recipe takes, as flags."""

from __future__ import annotations

import contextlib
import enum
import inspect
import io
import itertools
import math
import re
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import tyro
from tyro.constructors import PrimitiveConstructorSpec

from rein.foreign_names import refuse_unknown, written
from rein.schedules import Schedule

_DECORATION = re.compile(r"\x1b\[[0-9;]*m|[\u2500-\u257f]|^\s*-{5,}\s*$")  # colors and lines of boxes

_PATH = re.compile(r"[/\\]|^[.~]|\.[A-Za-z]\w*$")
_ID = re.compile(r"[\w-]+/[\w-]+-v\d+")  # of an environment, as ALE/Pong-v5
_COUNTS = re.compile(r"seed|epochs|iterations|.*(steps|starts|every|frequency)")  # which take no memory
_LARGEST = 1 << 20
_SIDES = {"size": 512, "width": 4096, "height": 4096, "critics": 64}  # of boards, pictures and agents
_TOGETHER = 1 << 26  # rows of an epoch, or weights between two layers
_LEAF = {bool: bool, int: int, float: (int, float), str: str, types.NoneType: types.NoneType}


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
    """Parse `words` into the recipe's own parameters and the common options that it does not have itself.

    `before` are values from a `run.json`, which hold unless `words` give others. Raises ValueError with one line for
    words that do not fit, and for a value of `before` that is of another type, a path or too large: the file may come
    from anybody.
    """
    hints = {**get_type_hints(common), **get_type_hints(recipe)}
    own = dict(inspect.signature(recipe).parameters)
    own.pop("store", None)
    shared = {k: p for k, p in inspect.signature(common).parameters.items() if k not in own}
    every = {k: p.replace(kind=p.KEYWORD_ONLY) for k, p in (own | shared).items()}
    hints = {key: _flag_type(hints.get(key, type(p.default))) for key, p in every.items()}
    parameters = {key: p for key, p in every.items() if hints[key] is not None}
    flags = {word.partition("=")[0].removeprefix("--").removeprefix("no-").replace("-", "_") for word in words}
    told = {key: value for key, value in (before or {}).items() if key in parameters and key not in flags}
    told = {key: value for key, value in told.items() if _as(value, parameters[key].default) != parameters[key].default}
    check_options(told)
    for key, value in told.items():
        if not _fits(value, hints[key]):
            raise ValueError(f"run.json: {key}={value!r:.80} cannot be taken from a file; give {_flag(key)} yourself")
        parameters[key] = parameters[key].replace(default=_as(value, parameters[key].default))
    return _parse(inspect.Signature(list(parameters.values())), hints, _document(recipe, shared), program, words)


def arguments_of(command: Callable[..., Any], program: str, words: Sequence[str]) -> dict[str, Any]:
    """Parse `words` into the keyword arguments of a command. Raises ValueError with one line for what does not fit."""
    hints = get_type_hints(command, include_extras=True)
    return _parse(inspect.signature(command), hints, inspect.getdoc(command) or "", program, words)


def _parse(
    signature: inspect.Signature, hints: Mapping[str, Any], document: str, program: str, words: Sequence[str]
) -> dict[str, Any]:
    def options(**values: Any) -> dict[str, Any]:
        return values

    options.__signature__ = signature  # type: ignore[attr-defined]
    defaults = {key: parameter.default for key, parameter in signature.parameters.items()}
    options.__annotations__ = {key: _with_constructor(hints[key], default) for key, default in defaults.items()}
    options.__doc__ = document
    flags = [word[2:].partition("=")[0].replace("-", "_") for word in words if word.startswith("--")]
    command, told = program.removeprefix("rein "), io.StringIO()
    try:
        with contextlib.redirect_stderr(told):
            values = tyro.cli(options, prog=program, args=list(words))
    except SystemExit as ended:
        if not ended.code:  # after --help
            raise
        known = {*signature.parameters, *(f"no_{key}" for key, hint in hints.items() if hint is bool), "help"}
        try:
            refuse_unknown(command, [flag for flag in flags if "." not in flag], known, flags=True)
        except TypeError as error:
            raise ValueError(str(error)) from None
        raise ValueError(f"{command}: {_in_one_line(told.getvalue())}; {program} --help shows the options") from None
    for key, value in values.items():
        if value == () and key in flags:
            raise ValueError(f"{command}: {written(key, True)}: give one value or more, separated by spaces")
    return values


def _in_one_line(text: str) -> str:
    """Return what tyro has drawn in a box as one line, without its heading and its help on the option."""
    lines = [_DECORATION.sub("", line).strip() for line in text.splitlines()]
    lines = list(itertools.takewhile(lambda line: not line.startswith(("Argument helptext", "For full help")), lines))
    words = " ".join(line for line in lines[1:] or lines if line)
    expected = "expected other values, separated by spaces, got"
    words = words.replace("Could not find valid parse for arguments:", expected)
    return words.removeprefix("Error parsing ").rstrip(".")


def _flag_type(hint: Any) -> Any:
    """Return the part of a type that a flag can give: numbers, texts, paths and choices; None if there is none."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        kept = [kind for one in inner if (kind := _flag_type(one)) is not None]
        return Union[tuple(kept)] if kept != [types.NoneType] else None  # noqa: UP007  # of a list
    if origin is Sequence:
        return None if get_origin(inner[0]) else tuple[inner[0], ...]
    if origin in (Annotated, Literal, tuple, list, set, dict):
        return hint
    simple = isinstance(hint, type) and (hint.__module__ in ("builtins", "types") or issubclass(hint, Path | enum.Enum))
    return hint if simple else None


def _with_constructor(hint: Any, default: Any) -> Any:
    """Return the type with a constructor for whole numbers that accepts 1e5, or for a default that is a schedule."""
    if isinstance(default, Schedule):
        return Annotated[Any, _number_or_schedule()]
    if hint is int:
        return Annotated[int, _whole_number("INT")]
    if hint == int | None:
        return Annotated[int | None, _whole_number("{None}|INT")]
    return hint


def _number_or_schedule() -> PrimitiveConstructorSpec[Any]:
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="FLOAT",
        instance_from_str=lambda given: float(given[0]),
        is_instance=lambda value: True,
        str_from_instance=lambda value: ["a schedule"],
    )


def _whole_number(metavar: str) -> PrimitiveConstructorSpec[Any]:
    def convert(given: list[str]) -> int | None:
        (text,) = given
        if text == "None" and "None" in metavar:
            return None
        try:
            return int(text)
        except ValueError:
            pass
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not number.is_integer():
            raise ValueError(f"expected a whole number such as 100000 or 1e5, got {text!r}")
        return int(number)

    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=convert,
        is_instance=lambda value: value is None or isinstance(value, int),
        str_from_instance=lambda value: [str(value)],
    )


def check_options(options: Mapping[str, Any]) -> None:
    """Check values from a `run.json`: raises ValueError for a path, and for a size that could fill the memory."""
    for key, value in options.items():
        _check(key, value)
    num_envs, iterations = options.get("num_envs"), options.get("iterations")
    if isinstance(num_envs, int) and isinstance(iterations, int) and num_envs * iterations > _TOGETHER:
        raise ValueError(
            f"run.json: num_envs={num_envs:,} times {iterations=:,} is too large; give one of them yourself"
        )


def _check(key: str, value: Any) -> None:
    """Check one value; those in lists and dictionaries, too."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            _check(name, inner)
    elif isinstance(value, list):
        pairs = [a * b for a, b in itertools.pairwise(value) if type(a) is int and type(b) is int]
        if max(pairs, default=0) > _TOGETHER:
            raise ValueError(f"run.json: {key}={value!r:.80} is too large; give {_flag(key)} yourself")
        for inner in value:
            _check(key, inner)
    elif isinstance(value, str) and not value.isprintable():
        raise ValueError(f"run.json: {key}={value!r:.80} cannot be printed; give {_flag(key)} yourself")
    elif isinstance(value, str) and _PATH.search(value) and not _ID.fullmatch(value):
        raise ValueError(f"run.json: {key}={value!r:.80}: a path is not taken from a file; give {_flag(key)} yourself")
    elif type(value) is int and not _COUNTS.fullmatch(key) and abs(value) > _SIDES.get(key, _LARGEST):
        most = _SIDES.get(key, _LARGEST)
        raise ValueError(f"run.json: {key}={value:,} is more than {most:,}; give {_flag(key)} yourself")


def _flag(key: str) -> str:
    return f"--{key.replace('_', '-')}"


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value from JSON is of the type that an option has; a type that JSON cannot say fits nothing."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return any(_fits(value, one) for one in inner)
    if origin is Literal:
        return value in inner
    if origin in (tuple, list) and isinstance(value, list):
        each = [inner[0]] * len(value) if origin is list or inner[1:] == (...,) else inner
        return len(each) == len(value) and all(map(_fits, value, each))
    kind = _LEAF.get(hint)
    return kind is not None and isinstance(value, kind) and (hint is bool or not isinstance(value, bool))


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
