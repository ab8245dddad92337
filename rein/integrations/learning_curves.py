"""Learning curves of runs, and returns of the learners of a population over an option in which they differ.

Shapes: K epochs, S learners.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from rein.errors import StoreError
from rein.files import absolute, short
from rein.integrations.plot import COLOURS, Curve, curve_of, draw_curves, make_figure, readable, short_number
from rein.loop.state import CLOCKS
from rein.store.metrics_files import EPOCHS, CSVTable, awaits_epoch
from rein.store.reader import Run, open_run

logger = logging.getLogger("rein")

Clock = Literal["env_steps", "vector_steps", "updates", "episodes", "iterations", "epochs", "seconds"]
OneRun = str | PathLike[str] | Run  # the folder of a run, or the opened run
Runs = OneRun | Iterable[OneRun]


_DEFAULTS = ("episode_return", "evaluation_return")  # metrics to plot by default
# Options of a recipe that do not distinguish runs
_IGNORED = ("seed", "threads", "checkpoint_every", "run", "resume", "quiet", "debug")
_SHOWN = 3  # options in a label


def plot(
    runs: Runs | Mapping[str, Runs], metric: str | None = None, *, clock: Clock = "env_steps", axes: Any = None
) -> Any:
    """Plot a metric of one or more runs over a clock and return the matplotlib Axes.

        rein.plot("runs/cartpole")
        rein.plot(["runs/seed0", "runs/seed1", "runs/seed2"], "episode_return_100")
        rein.plot({"lr 1e-3": slow, "lr 1e-2": fast}, clock="seconds")  # lists of runs

    A run is the path of its folder or an opened run. Runs that differ only in their seeds form one curve, the mean with
    its 95% bootstrap interval. A run that ended earlier than the others keeps its last value in the mean, and the title
    states it. A mapping names the curves: the runs of each label form one curve. The default metric is
    `episode_return`. The curves are drawn on `axes`, or in a new figure, which notebooks show.

    Raises ImportError without matplotlib, ValueError if a run lacks the metric or the clock, and StoreError if a path
    is not a run.
    """
    if isinstance(runs, Mapping):
        groups = {label: read_all(_paths(members)) for label, members in runs.items()}
        metric = choose_metric([run for group in groups.values() for run in group], metric, clock)
        curves = {str(label): [_curve(run, metric, clock) for run in group] for label, group in groups.items()}
    else:
        columns = read_all(_paths(runs))
        metric = choose_metric(columns, metric, clock)
        curves = grouped(columns, metric, clock)
    axes = make_figure(6.4, 4.0, on_screen=True).add_subplot() if axes is None else axes
    draw_curves(axes, curves, metric=metric, clock=clock)
    return axes


def _paths(runs: Runs) -> list[Path]:
    several = [runs] if isinstance(runs, str | PathLike | Run) else list(runs)
    if not several:
        raise ValueError("rein.plot: expected at least one run, got none; give the path of a run's folder")
    return [run.path if isinstance(run, Run) else absolute(run) for run in several]


class NoEpochYet(StoreError):
    """Raised if no epoch of a run has ended yet."""


class Columns(NamedTuple):
    """Clocks and metrics of a run at the ends of its epochs, (K,) each."""

    path: Path
    clocks: dict[str, np.ndarray]
    metrics: dict[str, np.ndarray]


class _Kind(NamedTuple):
    """Name and options of a run, which are the same for all seeds."""

    name: str
    options: dict[str, Any]  # of the recipe, or the configurations of all parts if there is no recipe
    is_recipe: bool
    seed: Any


def read_columns(path: Path) -> Columns:
    """Read the metrics of a run from `metrics.csv`, or from the table of epochs in its trajectories.

    Raises StoreError if it has neither, and NoEpochYet if its first epoch has not ended yet.
    """
    if awaits_epoch(path):
        raise NoEpochYet(f"{path}: no epoch has ended yet, so there is nothing to plot")
    table = CSVTable(path / EPOCHS).refresh()
    if not table:
        epochs = open_run(path).epochs
        return Columns(path, {**epochs["clocks"], "epochs": epochs["number"]}, dict(epochs["metrics"]))
    numbers = {name: column for name, column in table.items() if column.dtype.kind == "f"}
    if "epoch" in numbers:
        numbers["epochs"] = numbers.pop("epoch")
    clocks = {name: numbers.pop(name) for name in CLOCKS if name in numbers}
    return Columns(path, clocks, numbers)


def read_all(paths: Sequence[Path]) -> list[Columns]:
    """Read the metrics of several runs. Runs in which no epoch has ended yet are skipped with a warning.

    Raises StoreError if no run remains, and as `read_columns` does.
    """
    columns = []
    for number, path in enumerate(paths, 1):
        try:
            columns.append(read_columns(path))
        except NoEpochYet as error:
            if number == len(paths) and not columns:
                raise
            logger.warning("%s", error)
    return columns


def choose_metric(runs: Sequence[Columns], named: str | None, clock: str) -> str:
    """Return the metric to plot: `named`, or the return by default. Raises ValueError if a run lacks it."""
    for run in runs:
        if clock not in run.clocks:
            raise ValueError(f"{run.path}: has no clock {clock!r}; the clocks are {', '.join(run.clocks)}")
    shared = [name for name in runs[0].metrics if all(_has(run, name, clock) for run in runs)]
    if named is None:
        default = next((name for name in (*_DEFAULTS, *shared) if name in shared), None)
        if default is None:
            raise ValueError(f"{runs[0].path}: no metric has a value yet, so there is nothing to plot")
        return default
    for run in runs:
        if named not in run.metrics:
            raise ValueError(f"{run.path}: has no metric {named!r}; the metrics are {', '.join(run.metrics)}")
        if not _has(run, named, clock):
            raise ValueError(f"{run.path}: its metric {named!r} has no finite value")
    return named


def grouped(runs: Sequence[Columns], metric: str, clock: str) -> dict[str, list[Curve]]:
    """Return curves by label. Runs that differ only in their seeds share a label; runs of the same seed do not."""
    kinds = [_kind(open_run(run.path, follow=True)) for run in runs]
    groups: dict[str, list[int]] = {}
    for index, kind in enumerate(kinds):
        same = str(short(runs[index].path)) if kind is None else json.dumps([kind.name, kind.options], sort_keys=True)
        groups.setdefault(same, []).append(index)
    curves: dict[str, list[Curve]] = {}
    labels = _labels([kinds[members[0]] for members in groups.values()])
    for label, members in zip(labels, groups.values(), strict=True):
        seeds = [json.dumps(kind.seed) for index in members if (kind := kinds[index]) is not None]
        one_band = label is not None and len(set(seeds)) == len(members)
        for index in members:
            name = label if one_band and label is not None else str(short(runs[index].path))
            curves.setdefault(name, []).append(_curve(runs[index], metric, clock))
    return curves


def _curve(run: Columns, metric: str, clock: str) -> Curve:
    return curve_of(run.clocks[clock], run.metrics[metric])


def _has(run: Columns, metric: str, clock: str) -> bool:
    return metric in run.metrics and bool((np.isfinite(run.metrics[metric]) & np.isfinite(run.clocks[clock])).any())


def _kind(run: Run) -> _Kind | None:
    """Read name and options of a run from its `run.json`; None if they are missing."""
    parts = run.info.get("parts")
    if not isinstance(parts, Mapping):
        return None
    config = _config(parts, "recipe")
    if isinstance(config.get("options"), Mapping):
        options = dict(config["options"])
        compared = {name: value for name, value in options.items() if name not in _IGNORED}
        return _Kind(str(config.get("name")), compared, True, options.get("seed"))
    seed = {name: _config(parts, name).get("seed") for name in ("agent", "environment")}
    options = {name: _without_seeds(part) for name, part in parts.items() if name != "store"}
    return _Kind(f"{_class(parts, 'agent')} in {_class(parts, 'environment')}", options, False, seed)


def _labels(kinds: Sequence[_Kind | None]) -> list[str | None]:
    """Return a label for each kind, with the options in which recipes of the same name differ.

    None is replaced by the path of the run.
    """
    labels: list[str | None] = []
    for kind in kinds:
        others = [other for other in kinds if kind and other and other is not kind and other.name == kind.name]
        if kind is None or (others and not kind.is_recipe):
            labels.append(None)
            continue
        names = dict.fromkeys(name for other in (kind, *others) for name in other.options)
        differ = [name for name in names if any(_option(o, name) != _option(kind, name) for o in others)]
        options = [f"{name.replace('_', ' ')} {_option(kind, name)}" for name in differ[:_SHOWN]]
        labels.append(", ".join([kind.name, *options]))
    return [None if labels.count(label) > 1 else label for label in labels]


def _option(kind: _Kind, option: str) -> str:
    return json.dumps(kind.options.get(option))


def _config(parts: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = parts.get(name)
    config = part.get("config") if isinstance(part, Mapping) else None
    return config if isinstance(config, Mapping) else {}


def _class(parts: Mapping[str, Any], name: str) -> str:
    part = parts.get(name)
    class_name = str(part.get("type", name)) if isinstance(part, Mapping) else name
    return str(_config(parts, name).get("id", class_name.rpartition(".")[2]))


def _without_seeds(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_seeds(inner) for key, inner in value.items() if key not in _IGNORED}
    return [_without_seeds(inner) for inner in value] if isinstance(value, list) else value


METRIC = "learner_return"
_LOGARITHMIC = 10.0  # smallest ratio of positive values for a logarithmic axis


class Learners(NamedTuple):
    """Value of an option and return of each learner."""

    values: list[Any]  # (S,) numbers or texts
    returns: np.ndarray  # (S,) last finite value of the metric; NaN if it has none


def read_learners(path: Path, option: str, metric: str | None = None) -> Learners:
    """Read the values of an option and the last returns of the learners of a run.

    The option is one in which the learners differ. A schedule counts as its initial value. Options that
    `rein.handlers.population_based_training` changes have their last values.

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
    finite = column[np.isfinite(column)]
    return float(finite[-1]) if len(finite) else float("nan")


def _differing(info: Mapping[str, Any], count: int) -> dict[str, list[Any]]:
    """Return the options in which the learners differ, from the description of a run, which is not trusted."""
    parts = info.get("parts")
    config = _config(parts if isinstance(parts, Mapping) else {}, "agent")
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
