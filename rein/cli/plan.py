"""Options of a run on the command line: those of a file, replaced by those in the words of the user."""

from __future__ import annotations

import inspect
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from rein.cli.options import LIMITS, parse
from rein.cli.recipes import Recipe, find
from rein.cli.spaces import values_of_learners
from rein.foreign_names import written

_LIMITS = [written(limit, True) for limit in LIMITS]
_MOST_THREADS = max(64, os.cpu_count() or 1)
# Options of commands, which do not describe a run. A recipe may have options of the same names.
_NOT_RECORDED = ("run", "resume", "quiet", "debug", "config", "like")
_OF_SEVERAL = ("seeds", "jobs", "param", "trials", "metric", "prune")
# Limits for --param in a file: parsing a choice takes about 10 ms
_CHOICES = 128
_CHARACTERS = 8192


@attrs.frozen
class Plan:
    """A recipe with all its options, and the flags that were given."""

    name: str
    function: Callable[..., Any]
    options: dict[str, Any]
    given: list[str]
    params: Sequence[str] = ()  # options that differ between learners, as given by --param
    each: Mapping[str, list[Any]] = attrs.field(factory=dict)  # the values of all learners for these options

    @property
    def own(self) -> Mapping[str, inspect.Parameter]:
        """Parameters of the recipe."""
        return inspect.signature(self.function).parameters

    @property
    def recipe(self) -> Recipe:
        """Recipe and options as recorded in the folder of the run."""
        commands = (*_NOT_RECORDED, *_OF_SEVERAL)
        recorded = {key: value for key, value in self.options.items() if key in self.own or key not in commands}
        recorded |= {"param": list(self.params)} if self.params else {}
        return Recipe(self.name, recorded, self.given)

    @property
    def env_steps(self) -> int | None:
        """Env steps that end the run. Those of the recipe do so only if no other limit is given."""
        return self.options["env_steps"] if "--env-steps" in self.given or "--epochs" not in self.given else None


def plan(
    name: str,
    words: list[str],
    before: Recipe | None = None,
    command: str = "train",
    also: Sequence[Callable[..., None]] = (),
) -> Plan:
    """Parse `words` as options of the recipe `name`. The other options are those of `before`, read from a file.

    If `words` contain a limit (epochs or env steps), the limits of `before` do not apply. `also` declares further
    options of the command.
    """
    function, words = find(name), list(words)
    own = inspect.signature(function).parameters
    params, file = take_all(words, "--param"), None
    flags = given = flags_of(words)
    stored: dict[str, Any] = {}
    if before is not None:
        before = _without_replaced(before, flags, own)
        given = [*flags_of(before.given), *flags]
        stored = {"before": {key: value for key, value in before.options.items() if key != "param"}}
        stored["file"] = before.source
        if not params:
            params, file, flags = params_of(before), before.source, given
    options = parse(function, f"rein {command} {name}", words, **stored, also=also)
    _check(name, options, own)
    if options.get("learners", 1) != 1 and "--stop-when-solved" not in given and "stop_when_solved" in own:
        options["stop_when_solved"] = False  # the mean of all learners does not tell whether one is solved
    if not params:
        return Plan(name, function, options, given)
    each = values_of_learners(params, function, options, lambda more: plan(name, more), flags, file)
    return Plan(name, function, options, given, params, each)


def params_of(recipe: Recipe) -> list[str]:
    """Return the options that differ between learners, from a file.

    Raises ValueError if they are not texts, or have more choices or characters than are read from a file.
    """
    params = recipe.options.get("param", [])
    if not (isinstance(params, list) and all(isinstance(text, str) and text.isprintable() for text in params)):
        raise ValueError(f"{recipe.source}: param is not a list of texts; set --param")
    choices, characters = sum(text.count("|") + 1 for text in params), sum(map(len, params))
    if choices > _CHOICES or characters > _CHARACTERS:
        most = f"at most {_CHOICES} and {_CHARACTERS:,} are read from a file; set --param"
        raise ValueError(f"{recipe.source}: param has {choices:,} choices and {characters:,} characters; {most}")
    return params


def take(words: list[str], flag: str) -> str | None:
    """Remove a flag and its value from `words` and return the value; None without the flag. The last one counts."""
    return next(reversed(take_all(words, flag)), None)


def take_all(words: list[str], flag: str) -> list[str]:
    """Remove all occurrences of a flag and its value from `words` and return the values."""
    values: list[str] = []
    while found := [index for index, word in enumerate(words) if word.partition("=")[0] == flag]:
        _, equals, value = words.pop(found[0]).partition("=")
        if not equals and (found[0] == len(words) or words[found[0]].startswith("--")):
            raise ValueError(f"{flag} needs a value")
        values.append(value if equals else words.pop(found[0]))
    return values


def flags_of(words: Sequence[str]) -> list[str]:
    """Return the options in `words`, each written as `--env-steps`."""
    return [word.partition("=")[0].replace("_", "-") for word in words if word.startswith("--")]


def _without_replaced(before: Recipe, flags: Sequence[str], own: Mapping[str, inspect.Parameter]) -> Recipe:
    """Return the recipe of an earlier run without the limits replaced by `flags`.

    Parameters of the recipe keep their values, because a schedule may depend on them.
    """
    old = [limit for limit in _LIMITS if limit not in flags] if set(_LIMITS) & set(flags) else []
    names = [flag.removeprefix("--").replace("-", "_") for flag in old]
    options = {key: value for key, value in before.options.items() if key in own or key not in names}
    given = [flag for flag in flags_of(before.given) if flag not in old]
    return attrs.evolve(before, options=options, given=given)


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


def usual_folder(name: str) -> Path:
    """Return the folder of a run without `--run`."""
    return Path("runs") / name.replace(":", "-")


def free(path: Path) -> Path:
    """Return the path, or the first of `path-2`, `path-3`, ... that does not exist."""
    numbered = (path.with_name(f"{path.name}-{number}") for number in itertools.count(2))
    return next(candidate for candidate in itertools.chain([path], numbered) if not candidate.exists())
