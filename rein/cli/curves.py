"""What `rein plot` draws of whole runs: their metrics, and which of them differ by their seeds alone."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rein.cli.output import say
from rein.cli.show import awaits_epoch
from rein.errors import StoreError
from rein.integrations.plot.curves import Curve, curve_of
from rein.loop.clocks import CLOCKS
from rein.store.metrics import EPOCHS, CSVTable
from rein.store.reader import Run, open_run

_FIRST = ("episode_return", "evaluation_return")  # what to draw where nobody says
_SAME = ("seed", "threads", "checkpoint_every", "run", "resume", "quiet", "debug")  # options that make no other recipe
_SHOWN = 3  # options in a label


class NoEpochYet(StoreError):
    """A run has only just begun."""


class Columns(NamedTuple):
    """What one run says of its epochs, (K,) each."""

    path: Path
    clocks: dict[str, np.ndarray]
    metrics: dict[str, np.ndarray]


class _Kind(NamedTuple):
    """What a run is, but for its seed."""

    name: str
    options: dict[str, Any]  # of the recipe; the configurations of all parts, where there is none
    is_recipe: bool
    seed: Any


def read_columns(path: Path) -> Columns:
    """The metrics of a run: of its `metrics.csv`, else of the table of epochs in its trajectories.

    Raises StoreError where it has neither, NoEpochYet where that is because its first epoch has not ended yet.
    """
    if awaits_epoch(path):
        raise NoEpochYet(f"{path}: no epoch has ended yet, so there is nothing to draw")
    told = CSVTable(path / EPOCHS).refresh()
    if not told:
        table = open_run(path).epochs
        return Columns(path, {**table["clocks"], "epochs": table["number"]}, dict(table["metrics"]))
    numbers = {name: column for name, column in told.items() if column.dtype.kind == "f"}
    if "epoch" in numbers:
        numbers["epochs"] = numbers.pop("epoch")
    clocks = {name: numbers.pop(name) for name in CLOCKS if name in numbers}
    return Columns(path, clocks, numbers)


def read_all(paths: Sequence[Path]) -> list[Columns]:
    """The metrics of runs, those left out and named on standard error in which no epoch has ended yet.

    Raises StoreError where that is all of them, and as `read_columns` does.
    """
    found = []
    for number, path in enumerate(paths, 1):
        try:
            found.append(read_columns(path))
        except NoEpochYet as error:
            if number == len(paths) and not found:
                raise
            say(f"rein: {error}", error=True)
    return found


def choose_metric(runs: Sequence[Columns], named: str | None, clock: str) -> str:
    """The metric to draw: the one that is named, else the return. Raises ValueError where a run lacks it."""
    shared = [name for name in runs[0].metrics if all(_has(run, name, clock) for run in runs)]
    if named is None:
        found = next((name for name in (*_FIRST, *shared) if name in shared), None)
        if found is None:
            raise ValueError(f"{runs[0].path}: no metric is known at two times; there is nothing to draw yet")
        return found
    for run in runs:
        if clock not in run.clocks:
            raise ValueError(f"{run.path}: has no clock {clock!r}; there are {', '.join(run.clocks)}")
        if named not in run.metrics:
            raise ValueError(f"{run.path}: has no metric {named!r}; there are {', '.join(run.metrics)}")
        if not _has(run, named, clock):
            raise ValueError(f"{run.path}: its metric {named!r} was never a number")
    return named


def grouped(runs: Sequence[Columns], metric: str, clock: str) -> dict[str, list[Curve]]:
    """Curves by label: runs that differ by their seeds alone are one, and two of the same seed are two."""
    kinds = [_kind(open_run(run.path, follow=True)) for run in runs]
    groups: dict[str, list[int]] = {}
    for index, kind in enumerate(kinds):
        same = str(runs[index].path) if kind is None else json.dumps([kind.name, kind.options], sort_keys=True)
        groups.setdefault(same, []).append(index)
    curves: dict[str, list[Curve]] = {}
    labels = _labels([kinds[members[0]] for members in groups.values()])
    for label, members in zip(labels, groups.values(), strict=True):
        seeds = [json.dumps(kind.seed) for index in members if (kind := kinds[index]) is not None]
        one_band = label is not None and len(set(seeds)) == len(members)
        for index in members:
            name = label if one_band and label is not None else str(runs[index].path)
            columns = runs[index]
            curves.setdefault(name, []).append(curve_of(columns.clocks[clock], columns.metrics[metric]))
    return curves


def _has(run: Columns, metric: str, clock: str) -> bool:
    if metric not in run.metrics or clock not in run.clocks:
        return False
    return bool((np.isfinite(run.metrics[metric]) & np.isfinite(run.clocks[clock])).any())


def _kind(run: Run) -> _Kind | None:
    """What `run.json` says that the run is; None where it does not."""
    parts = run.info.get("parts")
    if not isinstance(parts, Mapping):
        return None
    recipe = parts.get("recipe")
    config = recipe.get("config") if isinstance(recipe, Mapping) else None
    if isinstance(config, Mapping) and isinstance(config.get("options"), Mapping):
        options = dict(config["options"])
        kept = {name: value for name, value in options.items() if name not in _SAME}
        return _Kind(str(config.get("name")), kept, True, options.get("seed"))
    seed = {name: _config(parts, name).get("seed") for name in ("agent", "environment")}
    kept = {name: _without_seeds(part) for name, part in parts.items() if name != "store"}
    return _Kind(f"{_class(parts, 'agent')} in {_class(parts, 'environment')}", kept, False, seed)


def _labels(kinds: Sequence[_Kind | None]) -> list[str | None]:
    """A label for each; recipes of one name are told apart by the options in which they differ. None: by its folder."""
    labels: list[str | None] = []
    for kind in kinds:
        others = [other for other in kinds if kind and other and other is not kind and other.name == kind.name]
        if kind is None or (others and not kind.is_recipe):
            labels.append(None)
            continue
        names = dict.fromkeys(name for other in (kind, *others) for name in other.options)
        differ = [name for name in names if any(_said(o, name) != _said(kind, name) for o in others)]
        told = [f"{name.replace('_', ' ')} {_said(kind, name)}" for name in differ[:_SHOWN]]
        labels.append(", ".join([kind.name, *told]))
    return [None if labels.count(label) > 1 else label for label in labels]


def _said(kind: _Kind, option: str) -> str:
    return json.dumps(kind.options.get(option))


def _config(parts: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = parts.get(name)
    config = part.get("config") if isinstance(part, Mapping) else None
    return config if isinstance(config, Mapping) else {}


def _class(parts: Mapping[str, Any], name: str) -> str:
    part = parts.get(name)
    told = str(part.get("type", name)) if isinstance(part, Mapping) else name
    return str(_config(parts, name).get("id", told.rpartition(".")[2]))


def _without_seeds(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_seeds(inner) for key, inner in value.items() if key not in _SAME}
    return [_without_seeds(inner) for inner in value] if isinstance(value, list) else value
