"""Returns of the learners of a population over an option in which they differ.

Shapes: S learners.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rein.integrations.learning_curves import Columns, read_columns
from rein.integrations.plot import COLOURS, readable, short_number
from rein.store.reader import open_run

METRIC = "learner_return"
_LOGARITHMIC = 10.0  # smallest ratio of positive values for a logarithmic axis


class Learners(NamedTuple):
    """Value of an option and return of each learner."""

    values: list[Any]  # (S,) numbers or texts
    returns: np.ndarray  # (S,) last finite value of the metric; NaN if it has none


def read_learners(path: Path, option: str, metric: str | None = None) -> Learners:
    """Read the values of an option and the last returns of the learners of a run.

    The option is one in which the learners differ. A schedule counts as its initial value. Options that
    `rein.population_based_training` changes have their last values.

    Raises ValueError if the run is not of a population, or if its learners do not differ in the option.
    """
    columns, metric = read_columns(path), metric or METRIC
    count = next(number for number in range(len(columns.metrics) + 1) if f"{metric}/{number}" not in columns.metrics)
    if not count:
        raise ValueError(f"{path}: has no metric {metric}/0; the run is not of a rein.Population")
    returns = np.array([_last(columns, f"{metric}/{number}") for number in range(count)])
    if not np.isfinite(returns).any():
        raise ValueError(f"{path}: no learner has finished an episode yet")
    if f"{option}/0" in columns.metrics:
        return Learners([_last(columns, f"{option}/{number}") for number in range(count)], returns)
    differ = _differing(open_run(path, follow=True).info, count)
    if option not in differ:
        raise ValueError(
            f"{path}: the learners do not differ in {option!r}; they differ in {', '.join(differ) or 'none'}"
        )
    return Learners([shown_option(value) for value in differ[option]], returns)


def _last(columns: Columns, name: str) -> float:
    column = columns.metrics[name]
    known = column[np.isfinite(column)]
    return float(known[-1]) if len(known) else float("nan")


def _differing(info: Mapping[str, Any], count: int) -> dict[str, list[Any]]:
    """Return the options in which the learners differ, from the description of a run, which is not trusted."""
    parts = info.get("parts")
    agent = parts.get("agent") if isinstance(parts, Mapping) else None
    config = agent.get("config") if isinstance(agent, Mapping) else None
    if not isinstance(config, Mapping):
        return {}
    lists = {name: value for name, value in config.items() if isinstance(value, list) and len(value) == count}
    return {name: values for name, values in lists.items() if any(value != values[0] for value in values)}


def shown_option(value: Any) -> Any:
    """Return a number as it is, the initial value of a schedule, and anything else as a text."""
    segments = value.get("segments") if isinstance(value, Mapping) else None
    if isinstance(segments, list) and segments and isinstance(segments[0], Mapping):
        value = segments[0].get("start")
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number else value if isinstance(value, str) else json.dumps(value)


def draw_learners(axes: Any, runs: Mapping[str, Learners], *, option: str, metric: str | None = None) -> None:
    """Draw a point for each learner of each run, and mark the best one.

    The axis of the option is logarithmic if its values are positive and span a factor of 10.
    """
    numeric = all(isinstance(value, int | float) for run in runs.values() for value in run.values)
    marks: list[tuple[float, Any]] = []
    for index, (label, run) in enumerate(runs.items()):
        values = run.values if numeric else [readable(str(value)) for value in run.values]
        axes.plot(values, run.returns, "o", color=COLOURS[index % len(COLOURS)], alpha=0.8, label=readable(label))
        marks += [(value, values[i]) for i, value in enumerate(run.returns) if np.isfinite(value)]
    best, at = max(marks, key=lambda mark: mark[0])
    text = f"best: {short_number(best)} at {at:.3g}" if numeric else f"best: {short_number(best)} at {at}"
    axes.plot([at], [best], "*", color="black", markersize=13, label=text)
    numbers = [value for run in runs.values() for value in run.values] if numeric else []
    if numbers and min(numbers) > 0 and max(numbers) >= _LOGARITHMIC * min(numbers):
        axes.set_xscale("log")
    axes.set_xlabel(readable(option.replace("_", " ")))
    axes.set_ylabel("mean return of the last 100 episodes" if metric is None else readable(metric.replace("_", " ")))
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
