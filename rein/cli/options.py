"""Command-line flags from signatures and docstrings, and checks of options in a `run.json`."""

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

from rein.errors import refuse_unknown
from rein.foreign_names import written
from rein.schedules import Schedule

_DECORATION = re.compile(r"\x1b\[[0-9;]*m|[\u2500-\u257f]|^\s*-{5,}\s*$")  # colors and box lines

_PATH = re.compile(r"[/\\]|^[.~]|\.[A-Za-z]\w*$")
_ID = re.compile(r"[\w-]+/[\w-]+-v\d+")  # environment id such as ALE/Pong-v5
_COUNTS = re.compile(r"seed|epochs|iterations|.*(steps|starts|every|frequency)")  # counts, which need no memory
_LARGEST = 1 << 20
_SIDES = {"size": 512, "width": 4096, "height": 4096, "critics": 64, "learners": 256}  # of boards, pictures, agents
_TOGETHER = 1 << 26  # maximum rows of an epoch, or weights between two layers
LIMITS = ("epochs", "env_steps")  # options that end a run
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
    """Options of `rein train` for every recipe, with one line of help each.

    Args:
        run: folder of the run. Default: a new folder under runs/.
        epochs: maximum number of epochs.
        iterations: steps of every environment per epoch.
        env_steps: end the run after this number of env steps in total.
        threads: number of torch threads. One is fastest for small networks.
        checkpoint_every: epochs between checkpoints. Default: about every 30 seconds; 0 saves only at the end.
        resume: resume the run in the folder --run from its last checkpoint, or start it if there is none.
        quiet: hide the progress display.
        debug: print the traceback of an error.
    """


def source(
    config: Path | None = None,
    like: Path | None = None,
) -> None:
    """Options of `rein train` that name earlier options. The caller reads them before it parses the others.

    Args:
        config: TOML file with options of the recipe. The options on the command line replace those of the file.
        like: folder of a run, whose recipe and options are used for a new run.
    """


def several(
    seeds: str | None = None,
    jobs: int | None = None,
    param: str | None = None,
) -> None:
    """Options of `rein train` for several runs or learners.

    Args:
        seeds: train several seeds, such as 0-9 or 0,3,5, each in its own process and folder.
        jobs: number of simultaneous processes. Default: the number of cores.
        param: values of an option that differ between the learners of --learners, such as learning_rate=log:1e-4..1e-2,
            gamma=0.9..0.999 or activation=tanh|relu. Give --param for each option.
    """


def sweeping(
    param: str | None = None,
    trials: int = 50,
    metric: str = "episode_return_100",
    prune: bool = True,
    jobs: int | None = None,
) -> None:
    """Options of `rein sweep`.

    Args:
        param: values of an option, such as learning_rate=log:1e-4..1e-2, gamma=0.9..0.999 or hidden=[32,32]|[64,64].
            Give --param for each option to search.
        trials: number of trials, those of earlier commands on the same folder included.
        metric: metric to maximize, such as evaluation_return. The score of a trial is the last value of the metric.
        prune: end a trial early if its score is below the median of the earlier trials at the same share of the run.
        jobs: number of simultaneous processes. Default: the number of cores.
    """


def parse(
    recipe: Callable[..., Any],
    program: str,
    words: list[str],
    before: Mapping[str, Any] | None = None,
    *,
    file: str = "run.json",
    also: Sequence[Callable[..., None]] = (),
) -> dict[str, Any]:
    """Parse `words` into the options of a recipe and the common options that the recipe lacks.

    Values in `before`, read from `file`, are the defaults. `also` are functions like `common` that declare further
    options. Raises ValueError with a one-line message if a word does not fit, or if a value in `before` has another
    type, is a path or is too large: files are not trusted.
    """
    own = {key: parameter for key, parameter in inspect.signature(recipe).parameters.items() if key != "store"}
    shared: dict[str, inspect.Parameter] = {}
    types_of, lines = get_type_hints(recipe), list[str]()
    for declared in (common, *also):
        shared |= {key: value for key, value in inspect.signature(declared).parameters.items() if key not in own}
        types_of = {**get_type_hints(declared), **types_of}
        lines += (inspect.getdoc(declared) or "").splitlines()
    known = own | shared
    hints = {key: _flag_type(types_of.get(key, type(known[key].default))) for key in known}
    parameters = {
        key: known[key].replace(kind=inspect.Parameter.KEYWORD_ONLY) for key in known if hints[key] is not None
    }
    flags = {word.partition("=")[0].removeprefix("--").removeprefix("no-").replace("-", "_") for word in words}
    stored = {key: value for key, value in (before or {}).items() if key in parameters and key not in flags}
    stored = {key: value for key, value in stored.items() if _as(value, known[key].default) != known[key].default}
    check_options(stored, file)
    for key, value in stored.items():
        if value == "None" and not _fits(value, hints[key]):  # TOML has no None
            value = None
        if not _fits(value, hints[key]):
            raise ValueError(f"{file}: {key}={value!r:.80} is not accepted from a file; set {_flag(key)}")
        parameters[key] = parameters[key].replace(default=_as(value, known[key].default))
    document = inspect.getdoc(recipe) or "Run it."
    document += "" if "Args:\n" in document else "\n\nArgs:"
    document = "\n".join([document, *(line for line in lines if line.strip().partition(":")[0] in shared)])
    return _parse(inspect.Signature(list(parameters.values())), hints, document, program, words)


def arguments_of(command: Callable[..., Any], program: str, words: Sequence[str]) -> dict[str, Any]:
    """Parse `words` into the keyword arguments of a command. Raises ValueError with a one-line message."""
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
    command, errors = program.removeprefix("rein "), io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            values = tyro.cli(options, prog=program, args=list(words))
    except SystemExit as ended:
        if not ended.code:  # after --help
            raise
        known = {*signature.parameters, *(f"no_{key}" for key, hint in hints.items() if hint is bool), "help"}
        try:
            refuse_unknown(command, [flag for flag in flags if "." not in flag], known, flags=True)
        except TypeError as error:
            raise ValueError(str(error)) from None
        raise ValueError(f"{command}: {_in_one_line(errors.getvalue())}; see {program} --help") from None
    for key, value in values.items():
        if value == () and key in flags:
            raise ValueError(f"{command}: {written(key, True)} needs one value or more, separated by spaces")
    return values


def _in_one_line(text: str) -> str:
    """Return an error message of tyro as one line, without its box, its heading and the help of the option."""
    lines = [_DECORATION.sub("", line).strip() for line in text.splitlines()]
    lines = list(itertools.takewhile(lambda line: not line.startswith(("Argument helptext", "For full help")), lines))
    words = " ".join(line for line in lines[1:] or lines if line)
    expected = "expected other values, separated by spaces, got"
    words = words.replace("Could not find valid parse for arguments:", expected)
    return words.removeprefix("Error parsing ").rstrip(".")


def _flag_type(hint: Any) -> Any:
    """Return the part of a type that a flag can express: numbers, texts, paths and choices. None if there is none."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        kept = [kind for one in inner if (kind := _flag_type(one)) is not None]
        return Union[tuple(kept)] if kept != [types.NoneType] else None  # noqa: UP007  # built from a list
    if origin is Sequence:
        return None if get_origin(inner[0]) else tuple[inner[0], ...]
    if origin in (Annotated, Literal, tuple, list, set, dict):
        return hint
    simple = isinstance(hint, type) and (hint.__module__ in ("builtins", "types") or issubclass(hint, Path | enum.Enum))
    return hint if simple else None


def _with_constructor(hint: Any, default: Any) -> Any:
    """Return the type with a custom parser: integers accept 1e5, and options with a schedule accept a number."""
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


def check_options(options: Mapping[str, Any], file: str = "run.json") -> None:
    """Raise ValueError if a value from a file is a path, or a size that could fill the memory."""
    for key, value in options.items():
        _check(file, key, value)
    num_envs, iterations = options.get("num_envs"), options.get("iterations")
    if isinstance(num_envs, int) and isinstance(iterations, int) and num_envs * iterations > _TOGETHER:
        raise ValueError(
            f"{file}: num_envs={num_envs:,} times {iterations=:,} is too large; set one of them on the command line"
        )


def _check(file: str, key: str, value: Any) -> None:
    """Check one value, and the values in lists and dictionaries."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            _check(file, name, inner)
    elif isinstance(value, list):
        for inner in value:
            _check(file, key, inner)
        pairs = [a * b for a, b in itertools.pairwise(value) if type(a) is int and type(b) is int]
        if max(pairs, default=0) > _TOGETHER:
            raise ValueError(f"{file}: {key}={value!r:.80} is too large; set {_flag(key)}")
    elif isinstance(value, str) and not value.isprintable():
        raise ValueError(f"{file}: {key}={value!r:.80} contains unprintable characters; set {_flag(key)}")
    elif isinstance(value, str) and _PATH.search(value) and not _ID.fullmatch(value):
        raise ValueError(f"{file}: {key}={value!r:.80}: paths are not accepted from a file; set {_flag(key)}")
    elif type(value) is int and value.bit_length() > 64:  # Python does not print the largest ones
        raise ValueError(f"{file}: {key} is an integer of {value.bit_length():,} bits; set {_flag(key)}")
    elif type(value) is int and not _COUNTS.fullmatch(key) and abs(value) > _SIDES.get(key, _LARGEST):
        most = _SIDES.get(key, _LARGEST)
        raise ValueError(f"{file}: {key}={value:,} is more than {most:,}; set {_flag(key)}")


def _flag(key: str) -> str:
    return f"--{key.replace('_', '-')}"


def _fits(value: Any, hint: Any) -> bool:
    """Return whether a value from JSON has the type of an option; False for types that JSON does not have."""
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
    """Return a value from JSON as a tuple or a path if the default is one."""
    if isinstance(default, tuple) and isinstance(value, list):
        return tuple(value)
    return Path(value) if isinstance(default, Path) and isinstance(value, str) else value
