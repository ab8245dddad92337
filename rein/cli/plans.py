"""Plan of a run or a sweep: what it trains and all options, from the command line, a TOML file or a `run.json`."""

from __future__ import annotations

import difflib
import inspect
import itertools
import json
import math
import os
import re
import shlex
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from rein.cli.arguments import LIMITS, check_options, common, parse_options
from rein.cli.catalog import recipe_names
from rein.cli.experiment import Experiment
from rein.errors import StoreError, refuse_unknown
from rein.files import check_depth, followed, read_file, read_json
from rein.foreign_names import written
from rein.ops.random import stream_seed

CONFIG = "config.toml"  # in the folder of a run
PARAM_EXAMPLES = (
    "such as --param learning_rate=log:1e-4..1e-2, --param gamma=0.9..0.999 or --param 'hidden=[32,32]|[64,64]'"
)
_RANGE = re.compile(r"(?P<log>log:)?(?P<low>[^|]+?)\.\.(?P<high>[^|]+)")
_LIMIT_FLAGS = [written(limit, True) for limit in LIMITS]
_MOST_THREADS = max(64, os.cpu_count() or 1)
_ONLY_TYPED = ("run", "resume", "quiet", "debug")  # options that a file cannot set
_NAMES = ("env", "agent")
_NOTHING = Experiment()
_TABLES = {"environment": {"id": "env"}, "agent": {"name": "agent"}, "training": {}}  # of a TOML file, with their names
# Options of commands, which do not describe a run. A recipe may have options of the same names.
_NOT_RECORDED = (*_ONLY_TYPED, *_NAMES, "config", "like", "seeds", "jobs", "param", "trials", "metric", "prune")
_MOST_BYTES = 64 << 10  # of a TOML file
_MOST_DOTS = 256  # in a line, because the parser takes quadratic time and memory for a dotted key
_MOST_LEVELS = 16  # of tables and lists
# Limits for --param in a file: parsing a choice takes about 10 ms
_MOST_CHOICES = 128
_MOST_CHARACTERS = 8192


@attrs.frozen
class Recipe:
    """Part of a loop that records what is trained, all option values and the flags of the user."""

    experiment: Experiment
    options: Mapping[str, Any]
    flags: list[str] = attrs.field(factory=list)
    source: str = "run.json"  # file that contains the options

    @property
    def config(self) -> dict[str, Any]:
        """Names, options and flags as JSON, without options that JSON cannot express, such as schedules."""
        options = {key: str(value) if isinstance(value, Path) else value for key, value in self.options.items()}
        options = {key: value for key, value in options.items() if _is_json(value)}
        options = {key: list(value) if isinstance(value, tuple) else value for key, value in options.items()}
        return {**self.experiment.config, "options": options, "given": list(dict.fromkeys(self.flags))}

    @property
    def toml(self) -> bytes:
        """Names and options as TOML that `read_config` accepts.

        Limits without a flag, `epochs` or `env_steps`, are left out, because a limit in a file counts as a flag, and so
        are options that `param` sets.
        """
        options = self.config["options"]
        left_out = {name for name in LIMITS if written(name, True) not in self.flags}
        left_out |= {text.partition("=")[0].strip().replace("-", "_") for text in options.get("param", ())}
        names = self.experiment.config
        tables: dict[str, dict[str, Any]] = {
            table: {key: names[name] for key, name in keys.items() if name in names} for table, keys in _TABLES.items()
        }
        table_of = tables_of(self.experiment.function)
        for name, value in options.items():
            if name not in left_out:
                tables[table_of.get(name, "training")][name] = value
        parts = {"": {} if "env" in names else {"recipe": names["name"]}, **tables}
        texts = [f"[{table}]\n" * bool(table) + _lines(values) for table, values in parts.items() if values]
        return "\n".join(texts).encode(errors="replace")


def tables_of(function: Callable[..., Any]) -> Mapping[str, str]:
    """Return the table of a TOML file, "environment" or "agent", for options of the parts of a recipe."""
    return getattr(function, "tables", {})


def _lines(values: Mapping[str, Any]) -> str:
    return "".join(f"{name} = {_toml(value)}\n" for name, value in values.items())


def _is_json(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_json, value))
    return value is None or isinstance(value, bool | int | float | str)


def _toml(value: Any) -> str:
    """Return a value of a table as TOML, which has no None: it is written as the text on the command line."""
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, float):
        return repr(value)
    text = json.dumps("None" if value is None else value, ensure_ascii=False)
    return text.replace("\x7f", "\\u007f")  # TOML has no other rules for texts than JSON


def read_run(path: Path, typed: Experiment = _NOTHING, command: str = "resume") -> Recipe:
    """Return what the run in a folder trained, with the options in its `run.json`.

    `command` is the command that uses it. Raises StoreError if `run.json` cannot be read or has no recipe. Raises
    ValueError if the run needs code that is not part of rein, and the user has not `typed` its name.
    """
    file = path / "run.json"
    purpose = "resumed" if command == "resume" else "repeated"
    try:
        config = read_json(file)["parts"]["recipe"]["config"]
        stored, options, flags = Experiment.of(config), config["options"], config["given"]
        if not (isinstance(options, dict) and isinstance(flags, list)):
            raise TypeError("expected options and flags")
    except OSError as error:
        raise StoreError(f"{file}: cannot be read, so the run cannot be {purpose}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        why = f"does not name the recipe of the run; the run can be {purpose} in Python"
        raise StoreError(f"{file}: {why}: {error}") from error
    quoted = shlex.quote(str(path))
    usage = (f"rein resume {quoted}", "") if command == "resume" else (f"rein {command}", f" --like {quoted}")
    experiment = stored.completed(typed, file, *usage)
    return Recipe(experiment, options, [flag for flag in flags if isinstance(flag, str)])


def read_config(path: Path, typed: Experiment = _NOTHING, command: str = "train") -> Recipe:
    """Read a configuration file. What the user has `typed` replaces the recipe, the environment or the agent in it.

    Raises OSError or ValueError if the file cannot be read, is not TOML, or names code that is not part of rein, and
    TypeError for an unknown option.
    """
    options, table_of = _read_toml(path)
    names = {key: options.pop(key) for key in ("recipe", *_NAMES) if key in options}
    if wrong := [key for key, name in names.items() if not isinstance(name, str)]:
        raise ValueError(f"{path}: {wrong[0]} must be a text, got {names[wrong[0]]!r:.80}")
    if "recipe" in names and len(names) > 1:
        raise ValueError(f"{path}: names the recipe {names['recipe']!r:.80} and an environment or an agent; remove one")
    experiment = Experiment(**names).completed(typed, path, f"rein {command}", f" --config {shlex.quote(str(path))}")
    experiment.check(f'{path}: names no recipe; add a line such as recipe = "cartpole", or name it before --config')
    if typed_only := [written(option, True) for option in _ONLY_TYPED if option in options]:
        raise ValueError(f"{path}: {typed_only[0]} can only be given on the command line")
    function = experiment.function
    accepted = {*inspect.signature(function).parameters, *inspect.signature(common).parameters, "param"}
    refuse_unknown(str(path), options, accepted - {"store", *_ONLY_TYPED})
    right = tables_of(function)
    if wrong := [name for name in options if table_of[name] != right.get(name, "training")]:
        raise ValueError(f"{path}: {wrong[0]} belongs in [{right.get(wrong[0], 'training')}]")
    return Recipe(experiment, options, [written(option, True) for option in options], str(path))


def read_source(words: list[str], command: str) -> tuple[Experiment, Recipe | None, list[str]]:
    """Remove the recipe, or `--env` and `--agent`, and `--config FILE` or `--like RUN` from `words`.

    Returns what is trained, the options in the file or the run, and the words that name the file or the run.
    """
    typed = take_names(words)
    file = take(words, "--config")
    run = take(words, "--like")
    if file is not None and run is not None:
        raise ValueError(f"rein {command} --config {file} --like {run}: give one of the two")
    if file is not None:
        before = read_config(Path(file).expanduser(), typed, command)
        return before.experiment, before, ["--config", file]
    if run is not None:
        before = read_run(Path(run).expanduser(), typed, command)
        return before.experiment, before, ["--like", run]
    typed.check(f"rein {command}: name a recipe ({', '.join(recipe_names())}) or my_module:make_loop")
    return typed, None, []


def take_names(words: list[str]) -> Experiment:
    """Remove the recipe, which comes first, or `--env` and `--agent` from `words` and return them."""
    recipe = words.pop(0) if words and not words[0].startswith("-") else None
    typed = Experiment(recipe, take(words, "--env"), take(words, "--agent"))
    if recipe is not None and (typed.env or typed.agent):
        raise ValueError(f"{recipe}, {typed.env or typed.agent}: give either a recipe, or --env and --agent")
    missing = [name for name in _NAMES if getattr(typed, name) is None]
    for name in missing if len(missing) == 1 else []:
        if wrong := difflib.get_close_matches(f"--{name}", flags_of(words), 1, cutoff=0.8):
            raise ValueError(f"there is no option {wrong[0]}; did you mean --{name}?")
    return typed


def _read_toml(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the options in a TOML file by their names in Python, and the table of each."""
    try:
        text = read_file(followed(path), _MOST_BYTES).decode()
        if max(line.count(".") for line in text.split("\n")) > _MOST_DOTS:
            raise ValueError(f"a line has more than {_MOST_DOTS} dots")
        content = tomllib.loads(text)
        check_depth(content, _MOST_LEVELS)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: is not a TOML file of options: {error}") from error
    options: dict[str, Any] = {name: content.pop(name) for name in ("recipe",) if name in content}
    table_of: dict[str, str] = {}
    for table, values in content.items():
        if table not in _TABLES or not isinstance(values, dict):
            tables = ", ".join(f"[{name}]" for name in _TABLES)
            raise ValueError(f"{path}: {table} is not in a table; the tables of options are {tables}")
        for name, value in values.items():
            option = _TABLES[table].get(name) or name.replace("-", "_")
            if option in options:
                raise ValueError(f"{path}: {option} is given twice; remove one of them")
            options[option] = value
            table_of[option] = table
    return options, table_of


@attrs.frozen
class Plan:
    """An experiment with all its options, and the flags of the user."""

    experiment: Experiment
    function: Callable[..., Any]
    options: dict[str, Any]
    flags: list[str]  # on the command line and in the file
    params: Sequence[str] = ()  # options that differ between learners, as in --param
    each: Mapping[str, list[Any]] = attrs.field(factory=dict)  # the values of all learners for these options

    @property
    def name(self) -> str:
        """Name for people."""
        return self.experiment.name

    @property
    def parameters(self) -> Mapping[str, inspect.Parameter]:
        """Parameters of the recipe."""
        return inspect.signature(self.function).parameters

    @property
    def recipe(self) -> Recipe:
        """Recipe and options as recorded in the folder of the run."""
        own = self.parameters
        recorded = {key: value for key, value in self.options.items() if key in own or key not in _NOT_RECORDED}
        recorded |= {"param": list(self.params)} if self.params else {}
        return Recipe(self.experiment, recorded, self.flags)

    @property
    def env_steps(self) -> int | None:
        """Env steps that end the run. Those of the recipe do so only if the user has set no other limit."""
        return self.options["env_steps"] if "--env-steps" in self.flags or "--epochs" not in self.flags else None


def make_plan(
    experiment: Experiment,
    words: Sequence[str],
    before: Recipe | None = None,
    command: str = "train",
    also: Sequence[Callable[..., None]] = (),
) -> Plan:
    """Parse `words` as options of the experiment. The other options are those of `before`, read from a file.

    If `words` contain a limit (epochs or env steps), the limits of `before` do not apply. `also` declares further
    options of the command.
    """
    function = experiment.function
    words = list(words)
    own = inspect.signature(function).parameters
    params = take_all(words, "--param")
    file = None
    param_flags = flags = flags_of(words)
    stored: dict[str, Any] = {}
    if before is not None:
        before = _without_replaced_limits(before, flags, own)
        flags = [*flags_of(before.flags), *flags]
        values = {key: value for key, value in before.options.items() if key != "param"}
        stored = {"stored": values, "file": before.source}
        if not params:
            params = _params_of(before)
            file = before.source
            param_flags = flags
    options = parse_options(function, shlex.join(["rein", command, *experiment.words]), words, **stored, also=also)
    _check(experiment.name, options, own)
    if options.get("learners", 1) != 1 and "--stop-when-solved" not in flags and "stop_when_solved" in own:
        options["stop_when_solved"] = False  # the mean of all learners does not tell whether one is solved
    if not params:
        return Plan(experiment, function, options, flags)
    each = _values_of_learners(params, function, options, lambda more: make_plan(experiment, more), param_flags, file)
    return Plan(experiment, function, options, flags, params, each)


def call_recipe(plan: Plan, **arguments: Any) -> Any:
    """Call the recipe of a plan with these arguments, and with the options that differ from their defaults."""
    options = {**plan.options, **plan.each}
    parameters = plan.parameters
    return plan.function(
        **arguments,
        **{key: value for key, value in options.items() if key in parameters and value != parameters[key].default},
    )


def _params_of(recipe: Recipe) -> list[str]:
    """Return the options that differ between learners, from a file.

    Raises ValueError if they are not texts, or have more choices or characters than are read from a file.
    """
    params = recipe.options.get("param", [])
    if not (isinstance(params, list) and all(isinstance(text, str) and text.isprintable() for text in params)):
        raise ValueError(f"{recipe.source}: param is not a list of texts; set --param")
    choices = sum(text.count("|") + 1 for text in params)
    characters = sum(map(len, params))
    if choices > _MOST_CHOICES or characters > _MOST_CHARACTERS:
        most = f"at most {_MOST_CHOICES} and {_MOST_CHARACTERS:,} are read from a file; set --param"
        raise ValueError(f"{recipe.source}: param has {choices:,} choices and {characters:,} characters; {most}")
    return params


def _without_replaced_limits(before: Recipe, flags: Sequence[str], own: Mapping[str, inspect.Parameter]) -> Recipe:
    """Return the recipe of an earlier run without the limits that `flags` replace.

    Parameters of the recipe keep their values, because a schedule may depend on them.
    """
    old = [limit for limit in _LIMIT_FLAGS if limit not in flags] if set(_LIMIT_FLAGS) & set(flags) else []
    names = [flag.removeprefix("--").replace("-", "_") for flag in old]
    options = {key: value for key, value in before.options.items() if key in own or key not in names}
    return attrs.evolve(before, options=options, flags=[flag for flag in flags_of(before.flags) if flag not in old])


def _check(name: str, options: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    if not 1 <= options["threads"] <= _MOST_THREADS:  # OpenMP aborts the process if it cannot start its threads
        raise ValueError(f"--threads {options['threads']}: must be 1 to {_MOST_THREADS}")
    for key in ("epochs", "iterations", "env_steps"):
        if isinstance(options[key], int) and options[key] < 1:
            raise ValueError(f"{written(key, True)} {options[key]}: must be 1 or more")
    every = options["checkpoint_every"]
    if every is not None and every < 0:
        raise ValueError(f"--checkpoint-every {every}: must be a number of epochs, or 0 to save only at the end")
    if options["run"] is not None and "store" not in own:
        raise ValueError(f"--run {options['run']}: {name} has no parameter `store`, so nothing can be stored")
    if options["resume"] and options["run"] is None:
        raise ValueError("--resume: give the run with --run PATH, or use rein resume PATH")


@attrs.frozen
class Space:
    """Values of an option to search or to compare, as in `--param learning_rate=log:1e-4..1e-2`."""

    name: str
    text: str  # as on the command line
    kind: str  # "int", "float" or "choice"
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    choices: tuple[str, ...] = ()
    values: tuple[Any, ...] = attrs.field(default=(), eq=False)  # the choices, parsed

    @classmethod
    def parse(cls, text: str, names: set[str], check: Callable[[list[str]], Plan]) -> Space:
        """Return the space that `--param TEXT` describes for one of the options `names`.

        `check` parses the options of a trial.
        """
        name, _, values = text.partition("=")
        name = name.strip().replace("-", "_")
        if not values:
            raise ValueError(f"--param {text}: give a name and its values, {PARAM_EXAMPLES}")
        refuse_unknown("--param", [name], names)
        ends = _RANGE.fullmatch(values)
        texts = values.split("|") if ends is None else [ends["low"], ends["high"]]
        parsed = [check(words_of({name: text})).options[name] for text in texts]
        if ends is None:
            return cls(name, values, "choice", choices=tuple(texts), values=tuple(parsed))
        low, high = (end if isinstance(end, int | float) else math.nan for end in parsed)
        log = ends["log"] is not None
        if not (low < high and math.isfinite(high - low) and (low > 0 or not log)):
            above = " above 0" if log else ""
            raise ValueError(f"--param {text}: expected two numbers{above}, the lower one first")
        return cls(name, values, "int" if all(isinstance(end, int) for end in parsed) else "float", low, high, log)

    def suggest(self, trial: Any) -> Any:
        """Return the value of a trial of Optuna; a trial that has one keeps it."""
        if self.kind == "choice":
            return trial.suggest_categorical(self.name, self.choices)
        suggest = trial.suggest_int if self.kind == "int" else trial.suggest_float
        return suggest(self.name, self.low, self.high, log=self.log)

    def spread(self, count: int) -> list[Any]:
        """Return evenly spaced values. Choices are repeated."""
        if self.kind == "choice":
            return [self.values[number % len(self.values)] for number in range(count)]
        values = (np.geomspace if self.log else np.linspace)(self.low, self.high, count).tolist()
        return [round(value) for value in values] if self.kind == "int" else values


def refuse_repeated(spaces: Sequence[Space], flags: Sequence[str], file: str | None = None) -> None:
    """Raise ValueError if an option of `spaces`, perhaps from a file, is that of another space or one of the flags."""
    names = [space.name for space in spaces]
    where = "" if file is None else f" in {file}"
    for name in names:
        if names.count(name) > 1 or not {written(name, True), written(f"no_{name}", True)}.isdisjoint(flags):
            advice = "give either its values or a single value"
            raise ValueError(f"--param {name}{where}: the option is given twice; {advice}")


def _values_of_learners(
    texts: Sequence[str],
    function: Callable[..., Any],
    options: Mapping[str, Any],
    check: Callable[[list[str]], Plan],
    flags: Sequence[str],
    file: str | None,
) -> dict[str, list[Any]]:
    """Return the value of each learner for the options that `--param TEXT ...` sets.

    The values of the first option are in ascending order. Those of each further option are in a random order that
    depends on the seed, so that the options are not correlated. Values in `texts` that come from a file are checked.
    """
    learners = options.get("learners", 1)
    each = dict[str, list[Any]]()
    can_differ = getattr(function, "per_learner", ())
    if not isinstance(learners, int) or learners < 2:
        raise ValueError(f"--param {texts[0]}: give the number of learners, such as --learners 16")
    spaces = [Space.parse(text, {*options}, check) for text in texts]
    refuse_repeated(spaces, flags, file)
    for index, space in enumerate(spaces):
        if space.name not in can_differ:
            raise ValueError(
                f"--param {space.name}: all learners have the same value; the options that can differ are "
                f"{', '.join(sorted(can_differ)) or 'those of a function with @recipe'}"
            )
        values = space.spread(learners)
        if file is not None:
            for value in values:
                check_options({space.name: value if isinstance(value, int | float) else str(value)}, file)
        if index:
            generator = np.random.default_rng(stream_seed(options.get("seed", 0), f"param {space.name}"))
            values = [values[place] for place in generator.permutation(learners)]
        each[space.name] = values
    return each


def take(words: list[str], flag: str) -> str | None:
    """Remove a flag and its value from `words` and return the value; None without the flag. The last one counts."""
    return next(reversed(take_all(words, flag)), None)


def take_all(words: list[str], flag: str) -> list[str]:
    """Remove all occurrences of a flag and its value from `words` and return the values."""
    values: list[str] = []
    while places := [index for index, word in enumerate(words) if word.partition("=")[0] == flag]:
        _, equals, value = words.pop(places[0]).partition("=")
        if not equals and (places[0] == len(words) or words[places[0]].startswith("--")):
            raise ValueError(f"{flag} needs a value")
        values.append(value if equals else words.pop(places[0]))
    return values


def flags_of(words: Sequence[str]) -> list[str]:
    """Return the options in `words`, each written as `--env-steps`."""
    return [word.partition("=")[0].replace("_", "-") for word in words if word.startswith("--")]


def words_of(params: Mapping[str, Any]) -> list[str]:
    """Return values as words of the command line: `--hidden 32 32`, `--no-dueling`, `--gamma=0.99`."""
    words: list[str] = []
    for name, value in params.items():
        text = str(value).strip()
        if text in ("true", "false"):
            words.append(written(name if text == "true" else f"no_{name}", True))
        elif text.startswith("["):
            words += [written(name, True), *(part.strip() for part in text.strip("[]").split(","))]
        else:
            words.append(f"{written(name, True)}={text}")
    return words


def usual_folder(name: str) -> Path:
    """Return the folder of a run without `--run`."""
    return Path("runs") / re.sub("[:/]", "-", name)


def free_folder(path: Path) -> Path:
    """Return the path, or the first of `path-2`, `path-3`, ... that does not exist."""
    numbered = (path.with_name(f"{path.name}-{number}") for number in itertools.count(2))
    return next(candidate for candidate in itertools.chain([path], numbered) if not candidate.exists())
