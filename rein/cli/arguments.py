"""Command-line arguments from signatures and docstrings, by tyro, and checks of option values from files."""

from __future__ import annotations

import contextlib
import enum
import inspect
import io
import itertools
import re
import shutil
import sys
import textwrap
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
# Groups in the help: the most used options, those of worker processes, and those of the parts of a recipe
_FIRST = ("env", "agent", "env_steps", "epochs", "num_envs", "learning_rate", "seed", "seeds", "run", "log")
_WORKERS = ("workers", "mode", "timeout", "on_failure", "max_restarts")
_GROUPS = ("agent", "environment", "worker", "training")
_KEYWORD = inspect.Parameter.KEYWORD_ONLY
_METAVARS = {Path: "PATH", int: "INT", float: "FLOAT", str: "TEXT"}
_LEAF = {bool: bool, int: int, float: (int, float), str: str, types.NoneType: types.NoneType}


def named(
    env: str | None = None,
    agent: str | None = None,
) -> None:
    """Options that name an experiment instead of a recipe. The caller reads them before it parses the others.

    Args:
        env: environment to train in: a Gymnasium id, or my_module:make, a function or class that makes it.
        agent: algorithm, such as ppo or sac, or my_module:Class, a class derived from rein.Agent.
    """


def common(
    run: Path | None = None,
    epochs: int | None = None,
    iterations: int | None = None,
    env_steps: int | None = None,
    threads: int = 1,
    checkpoint_every: int | None = None,
    log: tuple[Literal["tensorboard", "wandb", "mlflow", "csv"], ...] = (),
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
        log: also log metrics to TensorBoard, Weights & Biases or MLflow. Every run writes its metrics.csv.
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
        param: values of an option for the --learners, such as gamma=0.9..0.99 or activation=tanh|relu; repeatable.
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
        param: values of an option to search, such as gamma=0.9..0.99, learning_rate=log:1e-4..1e-2; repeatable.
        trials: number of trials, those of earlier commands on the same folder included.
        metric: metric to maximize, such as evaluation_return. The score of a trial is the last value of the metric.
        prune: end a trial early if its score is below the median of the earlier trials at the same share of the run.
        jobs: number of simultaneous processes. Default: the number of cores.
    """


_HELP = {  # command -> arguments after it, description, and functions that declare further options
    "train": (
        "RECIPE | --env ID --agent NAME",
        "Train a recipe, an agent in an environment, or a loop that your function returns: my_module:make_loop.\n\n"
        "These are the options of all of them. rein train RECIPE --help lists all options of a recipe, and so does "
        "rein train --env ID --agent NAME --help. rein list lists the recipes.",
        (named, source, several),
    ),
    "resume": (
        "PATH [my_module:make_loop]",
        "Continue the run in a folder with its options. If its recipe is not part of rein, name its function.\n\n"
        "Options replace those of the run. rein resume PATH --help lists all of them.",
        (named,),
    ),
    "sweep": (
        "RECIPE | --env ID --agent NAME",
        "Search for good options of a recipe, or of an agent in an environment, with Optuna.\n\n"
        "These are the options of all of them. rein sweep RECIPE --help lists all options of a recipe.",
        (named, source, sweeping),
    ),
}


def parse_options(
    recipe: Callable[..., Any],
    program: str,
    words: Sequence[str],
    stored: Mapping[str, Any] | None = None,
    *,
    file: str = "run.json",
    also: Sequence[Callable[..., None]] = (),
) -> dict[str, Any]:
    """Parse `words` into the options of a recipe and the common options that the recipe lacks.

    Values in `stored`, read from `file`, are the defaults. `also` are functions like `common` that declare further
    options. Raises ValueError with a one-line message if a word does not fit, or if a stored value has another type,
    is a path or is too large: files are not trusted.
    """
    parameters: dict[str, inspect.Parameter] = {}
    hints: dict[str, Any] = {}
    texts: dict[str, str] = {}
    for function in (recipe, common, *also):  # earlier functions come first and take precedence
        parameters = {**parameters, **inspect.signature(function).parameters, **parameters}
        hints = get_type_hints(function) | hints
        texts = {**texts, **_help_texts(inspect.getdoc(function) or ""), **texts}
    parameters.pop("store", None)
    hints = {key: _flag_type(hints.get(key, type(parameter.default))) for key, parameter in parameters.items()}
    parameters = {key: parameters[key].replace(kind=_KEYWORD) for key, hint in hints.items() if hint is not None}
    flags = {word.partition("=")[0].removeprefix("--").removeprefix("no-").replace("-", "_") for word in words}
    values = {key: value for key, value in (stored or {}).items() if key in parameters and key not in flags}
    defaults = {key: parameters[key].default for key in values}
    values = {key: value for key, value in values.items() if _convert(value, defaults[key]) != defaults[key]}
    check_options(values, file)
    for key, value in values.items():
        if value == "None" and not _fits(value, hints[key]):  # TOML has no None
            value = None
        if not _fits(value, hints[key]):
            raise ValueError(f"{file}: {key}={value!r:.80} is not accepted from a file; set {written(key, True)}")
        parameters[key] = parameters[key].replace(default=_convert(value, defaults[key]))
    description = (inspect.getdoc(recipe) or "Run it.").partition("\n\nArgs:\n")[0]
    tables = getattr(recipe, "tables", {})
    groups = {key: "worker" if key in _WORKERS else tables.get(key, "training") for key in parameters}
    ordered = [parameters[key] for key in dict.fromkeys([*_FIRST, *parameters]) if key in parameters]
    groups = {key: group for key, group in groups.items() if key not in _FIRST}
    return _parse(inspect.Signature(ordered), hints, description, texts, program, words, groups)


def show_shared_options(command: str) -> None:
    """Print the help of `rein train`, `rein resume` or `rein sweep` without a recipe."""
    usage, text, also = _HELP[command]

    def any_recipe() -> None: ...

    any_recipe.__doc__ = text
    parse_options(any_recipe, f"rein {command} {usage}", ["--help"], also=also)


def parse_arguments(command: Callable[..., Any], program: str, words: Sequence[str]) -> dict[str, Any]:
    """Parse `words` into the keyword arguments of a command. Raises ValueError with a one-line message."""
    hints = get_type_hints(command, include_extras=True)
    document = inspect.getdoc(command) or ""
    description = document.partition("\n\nArgs:\n")[0]
    return _parse(inspect.signature(command), hints, description, _help_texts(document), program, words)


def _help_texts(document: str) -> dict[str, str]:
    """Return the text of each argument in a docstring, on one line."""
    texts = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", document.partition("\nArgs:\n")[2], re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in texts}


def _parse(
    signature: inspect.Signature,
    hints: Mapping[str, Any],
    description: str,
    texts: Mapping[str, str],
    program: str,
    words: Sequence[str],
    groups: Mapping[str, str] = types.MappingProxyType({}),
) -> dict[str, Any]:
    """Parse `words` as the parameters of a signature. `groups` has the heading in the help for some of them."""
    parameters = [
        parameter.replace(annotation=_annotation(hints[key], parameter.default, texts.get(key, "")))
        for key, parameter in signature.parameters.items()
    ]
    first = [parameter for parameter in parameters if parameter.name not in groups]
    used = [group for group in _GROUPS if group in groups.values()]
    for group in used:
        members = [parameter for parameter in parameters if groups.get(parameter.name) == group]
        nested = Annotated[Any, tyro.conf.arg(name=group, constructor=_collector(members))]
        first.append(inspect.Parameter(f"_{group}", _KEYWORD, annotation=nested))
    options = _collector(first, description)
    flags = [word[2:].partition("=")[0].replace("-", "_") for word in words if word.startswith("--")]
    command = program.removeprefix("rein ")
    errors = io.StringIO()
    shown = io.TextIOWrapper(io.BytesIO(), sys.stdout.encoding, errors="replace")
    shown.isatty = sys.stdout.isatty  # tyro uses colors on a terminal
    try:
        with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(shown):
            values = tyro.cli(options, prog=program, args=list(words), config=(tyro.conf.OmitArgPrefixes,))
    except SystemExit as ended:
        if not ended.code:  # after --help, whose description tyro does not wrap
            width = shutil.get_terminal_size().columns
            shown.seek(0)
            for line in shown.read().splitlines():
                sys.stdout.write(f"{textwrap.fill(line, width) if line[:1].isalpha() else line.rstrip()}\n")
            raise
        names = {
            key for key in signature.parameters if tyro.conf.Positional not in getattr(hints[key], "__metadata__", ())
        }
        names |= {*(f"no_{key}" for key, hint in hints.items() if hint is bool), "help"}
        try:
            refuse_unknown(command, [flag for flag in flags if "." not in flag], names, flags=True)
        except TypeError as error:
            raise ValueError(str(error)) from None
        raise ValueError(f"{command}: {_in_one_line(errors.getvalue())}; see {program} --help") from None
    for group in used:
        values |= values.pop(f"_{group}")
    for key, value in values.items():
        if value == () and key in flags:
            raise ValueError(f"{command}: {written(key, True)} needs one value or more, separated by spaces")
    return values


def _collector(parameters: Sequence[inspect.Parameter], description: str = "") -> Callable[..., dict[str, Any]]:
    """Return a function with these parameters that returns its arguments."""

    def collect(**values: Any) -> dict[str, Any]:
        return values

    collect.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    collect.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    collect.__doc__ = description
    return collect


def _in_one_line(text: str) -> str:
    """Return an error message of tyro as one line, without its box, its heading and the help of the option."""
    lines = [_DECORATION.sub("", line).strip() for line in text.splitlines()]
    lines = list(itertools.takewhile(lambda line: not line.startswith(("Argument helptext", "For full help")), lines))
    words = " ".join(line for line in lines[1:] or lines if line)
    if missing := re.match(r"Missing from [^:]*: (\S+)", words):
        return f"{missing[1]} is missing"
    expected = "expected other values, separated by spaces, got"
    words = words.replace("Could not find valid parse for arguments:", expected)
    return words.removeprefix("Error parsing ").rstrip(".")


def _flag_type(hint: Any) -> Any:
    """Return the part of a type that a flag can express: numbers, texts, paths and choices. None if there is none."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        kinds = [kind for one in inner if (kind := _flag_type(one)) is not None]
        return Union[tuple(kinds)] if kinds != [types.NoneType] else None  # noqa: UP007  # built from a list
    if origin is Sequence:
        return None if get_origin(inner[0]) else tuple[inner[0], ...]
    if origin in (Annotated, Literal, tuple, list, set, dict):
        return hint
    simple = isinstance(hint, type) and (hint.__module__ in ("builtins", "types") or issubclass(hint, Path | enum.Enum))
    return hint if simple else None


def _annotation(hint: Any, default: Any, text: str) -> Any:
    """Return the type with its help and its parser: integers accept 1e5, options with a schedule accept a number.

    The help shows a default of None only if its text explains it, and no empty default.
    """
    if isinstance(default, Schedule):
        return Annotated[Any, _constructor(float, "FLOAT"), tyro.conf.arg(help=text)]
    if hint is int:
        return Annotated[int, _constructor(_whole_number, "INT"), tyro.conf.arg(help=text)]
    metavar = next((name for kind, name in _METAVARS.items() if hint == kind | None), None)
    if hint == int | None:
        hint = Annotated[hint, _constructor(lambda text: None if text == "None" else _whole_number(text), "{None}|INT")]
    if default == () or (default is None and "None" not in text):
        return Annotated[hint, tyro.conf.arg(metavar=metavar, help=text, help_behavior_hint="")]
    return Annotated[hint, tyro.conf.arg(help=text)]


def _constructor(convert: Callable[[str], Any], metavar: str) -> PrimitiveConstructorSpec[Any]:
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=lambda texts: convert(texts[0]),
        is_instance=lambda value: True,
        str_from_instance=lambda value: [str(value)],
    )


def _whole_number(text: str) -> int:
    with contextlib.suppress(ValueError):
        return int(text)
    with contextlib.suppress(ValueError):
        if (number := float(text)).is_integer():
            return int(number)
    raise ValueError(f"expected a whole number such as 100000 or 1e5, got {text!r}")


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
    flag = written(key, True)
    if isinstance(value, Mapping):
        for name, inner in value.items():
            _check(file, name, inner)
    elif isinstance(value, list):
        for inner in value:
            _check(file, key, inner)
        pairs = [a * b for a, b in itertools.pairwise(value) if type(a) is int and type(b) is int]
        if max(pairs, default=0) > _TOGETHER:
            raise ValueError(f"{file}: {key}={value!r:.80} is too large; set {flag}")
    elif isinstance(value, str) and not value.isprintable():
        raise ValueError(f"{file}: {key}={value!r:.80} contains unprintable characters; set {flag}")
    elif isinstance(value, str) and _PATH.search(value) and not _ID.fullmatch(value):
        raise ValueError(f"{file}: {key}={value!r:.80}: paths are not accepted from a file; set {flag}")
    elif type(value) is int and value.bit_length() > 64:  # Python does not print the largest ones
        raise ValueError(f"{file}: {key} is an integer of {value.bit_length():,} bits; set {flag}")
    elif type(value) is int and not _COUNTS.fullmatch(key) and abs(value) > _SIDES.get(key, _LARGEST):
        raise ValueError(f"{file}: {key}={value:,} is more than {_SIDES.get(key, _LARGEST):,}; set {flag}")


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


def _convert(value: Any, default: Any) -> Any:
    """Return a value from JSON as a tuple or a path if the default is one."""
    if isinstance(default, tuple) and isinstance(value, list):
        return tuple(value)
    return Path(value) if isinstance(default, Path) and isinstance(value, str) else value
