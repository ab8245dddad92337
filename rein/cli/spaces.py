"""Values of an option to search or to compare, as given by `--param`: `learning_rate=log:1e-4..1e-2`."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from rein.cli.options import check_options
from rein.errors import refuse_unknown
from rein.foreign_names import written
from rein.ops.random import stream_seed

if TYPE_CHECKING:
    from rein.cli.plan import Plan

_NUMBERS = re.compile(r"(?P<log>log:)?(?P<low>[^|]+?)\.\.(?P<high>[^|]+)")

EXAMPLES = "such as --param learning_rate=log:1e-4..1e-2, --param gamma=0.9..0.999 or --param 'hidden=[32,32]|[64,64]'"


@attrs.frozen
class Space:
    """Values of an option to search."""

    name: str
    text: str  # as on the command line
    kind: str  # "int", "float" or "choice"
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    choices: tuple[str, ...] = ()
    values: tuple[Any, ...] = attrs.field(default=(), eq=False)  # the choices, parsed

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


def space_of(text: str, options: set[str], check: Callable[[list[str]], Plan]) -> Space:
    """Return the space that `--param TEXT` describes. `check` parses the options of a trial."""
    name, _, values = text.partition("=")
    name = name.strip().replace("-", "_")
    if not values:
        raise ValueError(f"--param {text}: give a name and its values, {EXAMPLES}")
    refuse_unknown("--param", [name], options)
    if found := _NUMBERS.fullmatch(values):
        ends = [check(words_of({name: end})).options[name] for end in (found["low"], found["high"])]
        low, high = (end if isinstance(end, int | float) else math.nan for end in ends)
        log = found["log"] is not None
        if not (low < high and math.isfinite(high - low) and (low > 0 or not log)):
            above = " above 0" if log else ""
            raise ValueError(f"--param {text}: expected two numbers{above}, the lower one first")
        return Space(name, values, "int" if all(isinstance(end, int) for end in ends) else "float", low, high, log)
    choices = tuple(values.split("|"))
    typed = tuple(check(words_of({name: choice})).options[name] for choice in choices)
    return Space(name, values, "choice", choices=choices, values=typed)


def refuse_twice(spaces: Sequence[Space], flags: Sequence[str], file: str | None = None) -> None:
    """Raise ValueError if an option of `spaces`, perhaps from a file, is that of another space or one of the flags."""
    names, where = [space.name for space in spaces], "" if file is None else f" in {file}"
    for name in names:
        if names.count(name) > 1 or not {written(name, True), written(f"no_{name}", True)}.isdisjoint(flags):
            advice = "give either its values or a single value"
            raise ValueError(f"--param {name}{where}: the option is given twice; {advice}")


def values_of_learners(
    texts: Sequence[str],
    function: Callable[..., Any],
    options: Mapping[str, Any],
    check: Callable[[list[str]], Plan],
    flags: Sequence[str] = (),
    file: str | None = None,
) -> dict[str, list[Any]]:
    """Return the value of each learner for the options that `--param TEXT ...` gives.

    The values of the first option are in ascending order. Those of each further option are in a random order that
    depends on the seed, so that the options are not correlated.

    Args:
        texts: values of options, such as `learning_rate=log:1e-4..1e-2`.
        function: recipe.
        options: its options.
        check: function that parses options of the recipe.
        flags: other options on the command line.
        file: file that contains the texts. Its values are not trusted.
    """
    learners, each = options.get("learners", 1), dict[str, list[Any]]()
    differ = getattr(function, "per_learner", ())
    if not isinstance(learners, int) or learners < 2:
        raise ValueError(f"--param {texts[0]}: give the number of learners, such as --learners 16")
    spaces = [space_of(text, {*options}, check) for text in texts]
    refuse_twice(spaces, flags, file)
    for index, space in enumerate(spaces):
        if space.name not in differ:
            raise ValueError(
                f"--param {space.name}: all learners have the same value; the options that can differ are "
                f"{', '.join(sorted(differ)) or 'those of a function with @recipe'}"
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
