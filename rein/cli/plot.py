"""`rein plot`: learning curves, fields and paths of episodes, and action values on the Gridworld."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import torch
import tyro

from rein.cli.options import arguments_of
from rein.cli.output import printable, say
from rein.cli.rebuild import environment_of, part_type, recipe_loop
from rein.cli.run_folder import awaits_epoch
from rein.envs.gridworld import Gridworld
from rein.errors import StoreError
from rein.integrations.plot import (
    Curve,
    curve_of,
    draw_curves,
    draw_field,
    draw_paths,
    draw_values,
    has_screen,
    make_figure,
)
from rein.loop.clocks import CLOCKS
from rein.store.checkpoint_file import Checkpoint
from rein.store.format.sealed import write_whole
from rein.store.loading import find as find_checkpoint
from rein.store.loading import load
from rein.store.metrics import EPOCHS, CSVTable
from rein.store.reader import Run, open_run
from rein.types import Episode, Tree

Clock = Literal["env_steps", "vector_steps", "updates", "episodes", "iterations", "epochs", "seconds"]

_LAST = 7  # episodes whose paths are drawn where nobody says
_BOARDS = 6
_GRIDWORLD = f"{Gridworld.__module__}.{Gridworld.__qualname__}"


def main(arguments: Sequence[str]) -> None:
    """The command `rein plot RUN [RUN ...]`."""
    _options(**arguments_of(_options, "rein plot", arguments))


def _options(
    runs: Annotated[tuple[Path, ...], tyro.conf.Positional],
    *,
    metric: str | None = None,
    clock: Clock = "env_steps",
    episode: tuple[int, ...] = (),
    field: str | None = None,
    paths: bool = False,
    values: bool = False,
    checkpoint: Path | None = None,
    output: Path | None = None,
) -> None:
    """Draw learning curves of runs; or of one run fields of episodes, or paths and values on the Gridworld.

    Runs that differ by their seeds alone are one curve: their mean, with its 95% bootstrap interval.

    Args:
        runs: folders of runs.
        metric: what the curves show; the return of an episode by default.
        clock: what they are drawn over.
        episode: the numbers of episodes, to draw a field of them or their paths.
        field: which field of the episodes, `observation` by default; of a nested one its path, `observation/camera`.
        paths: draw the paths of episodes on the Gridworld, of the last ones by default.
        values: draw what the agent takes each action to be worth in each cell of the Gridworld.
        checkpoint: the file to take the agent from; the run's newest by default.
        output: the picture to write, by its ending a PNG, SVG or PDF; a window by default, where there is a screen.
    """
    folders = list(runs)
    if not folders:
        raise ValueError("rein plot RUN [RUN ...]: name the folder of a run, or several")
    of_one = paths or values or bool(episode) or field is not None
    if of_one and len(folders) > 1:
        raise ValueError(f"rein plot: fields, paths and values are of one run, and {len(folders)} are named")
    if paths + values + (field is not None) > 1:
        raise ValueError("rein plot: give one of --field, --paths and --values")
    on_screen = output is None and has_screen()
    if not of_one:
        figure, what = _curves(folders, metric, clock, on_screen)
    elif values:
        figure, what = _values(open_run(folders[0]), checkpoint, on_screen)
    elif paths:
        figure, what = _paths(open_run(folders[0]), episode, on_screen)
    else:
        figure, what = _fields(open_run(folders[0]), episode, field or "observation", on_screen)
    if on_screen:
        _show()
    else:
        name = printable(f"{folders[0].resolve().name}-{what}.png").replace("?", "_")  # `what` comes from a file
        _write(figure, output or Path(name.replace("/", ".")))


def _curves(runs: Sequence[Path], metric: str | None, clock: str, on_screen: bool) -> tuple[Any, str]:
    columns = read_all(runs)
    name = choose_metric(columns, metric, clock)
    figure = make_figure(8.0, 5.0, on_screen=on_screen)
    draw_curves(figure.add_subplot(), grouped(columns, name, clock), metric=name, clock=clock)
    return figure, name


def _fields(run: Run, numbers: Sequence[int], name: str, on_screen: bool) -> tuple[Any, str]:
    if not numbers:
        raise ValueError(f"--field {name}: say of which episode, with --episode N")
    episodes = [run.episode(number) for number in numbers]
    drawn = [(episode, *part) for episode in episodes for part in _parts(run, episode, name)]
    figure = make_figure(8.0, 3.2 * len(drawn) + 0.6, on_screen=on_screen)
    for axes, (episode, path, values) in zip(figure.subplots(len(drawn), squeeze=False)[:, 0], drawn, strict=True):
        draw_field(axes, np.asarray(values), path)
        axes.set_title(_title(episode, path), fontsize="medium")
    return figure, f"episode-{numbers[0]}-{name}"


def _parts(run: Run, episode: Episode, name: str) -> list[tuple[str, Any]]:
    """The arrays of a field by their paths; several where it is nested."""
    every = dict(_by_path(episode.fields))
    found = [(path, array) for path, array in every.items() if path == name or path.startswith(f"{name}/")]
    if not found:
        raise ValueError(f"{run.path}: no field {name!r}; there are {', '.join(every)}")
    return found


def _by_path(tree: Tree, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every array with its path as `run.fields` has it: "/" is in no name, and "." may be."""
    for name, value in tree.items():
        where = f"{path}/{name}" if path else name
        yield from _by_path(value, where) if isinstance(value, Mapping) else [(where, value)]


def _title(episode: Episode, path: str) -> str:
    end = "terminated" if episode.terminated else "truncated"
    told = f"return {episode.episode_return:.6g}, {episode.length:,} steps, {end}"
    return f"{path} of episode {episode.id} ({told})"


def _paths(run: Run, numbers: Sequence[int], on_screen: bool) -> tuple[Any, str]:
    _check_gridworld(run)
    numbers = numbers or run.episodes["id"][run.episodes["whole"]][-_LAST:].tolist()
    if not numbers:
        raise ValueError(f"{run.path}: no whole episode is stored")
    size = environment_of(run).size
    places, targets = {}, set()
    for number in numbers:
        places[f"episode {number}"], target = _walked(run, number, size)
        targets.add(target)
    figure = make_figure(7.5, 5.5, on_screen=on_screen)
    axes = figure.add_subplot()
    draw_paths(axes, places, targets=sorted(targets), size=size)
    axes.set_title(f"paths of {len(numbers)} episode{'s' * (len(numbers) != 1)}", fontsize="medium")
    return figure, "paths"


def _walked(run: Run, number: int, size: int) -> tuple[np.ndarray[Any, Any], tuple[int, int]]:
    """Where an episode was at each step and at its end, (L + 1, 2), and its target, on a board of so many columns."""
    episode = run.episode(number)
    seen, final = episode.fields.get("observation"), episode.final_observation
    if seen is None or final is None:
        raise ValueError(f"{run.path}: observations were not stored, so there is no path to draw")
    seen = np.concatenate([seen, np.asarray(final)[None]])
    if seen.ndim != 2 or seen.shape[1] not in (4, 6):
        raise ValueError(f"{run.path}: observations {seen.shape[1:]} are not those of a Gridworld")
    cells = seen[:, :4] if seen.shape[1] == 4 else np.rint(seen[:, :4] * (size - 1))
    x, y = (int(place) for place in cells[0, 2:])
    return cells[:, :2].astype(np.int64), (x, y)


def _values(run: Run, checkpoint: Path | None, on_screen: bool) -> tuple[Any, str]:
    _check_gridworld(run)
    found = find_checkpoint(checkpoint or run.path)
    board_of = environment_of(run)
    targets, look = board_of.possible_targets, _values_of(run, found, board_of.size)
    if len(targets) > _BOARDS:
        raise ValueError(f"{run.path}: has {len(targets)} targets; {_BOARDS} boards at most are drawn")
    boards = [look(target) for target in targets]
    figure = make_figure(7.0 * len(boards), 6.0, on_screen=on_screen)
    for axes, target, board in zip(figure.subplots(1, len(boards), squeeze=False)[0], targets, boards, strict=True):
        draw_values(axes, board, target=target)
        axes.set_title(f"{found.path.stem}: what each action is worth; arrow: the best", fontsize="medium")
    return figure, "values"


def _values_of(run: Run, checkpoint: Checkpoint, size: int) -> Callable[[tuple[int, int]], np.ndarray[Any, Any]]:
    """A function from a target to the values (X, Y, A) of every cell: of the table, or of the agent's networks."""
    state = checkpoint.state.get("parts", {}).get("agent", {})
    table = state.get("table")
    if isinstance(table, torch.Tensor) and len(table) == size**4:
        table_XYXYA = table.numpy().reshape(*[size] * 4, -1)
        return lambda target: table_XYXYA[:, :, *target]
    loop = recipe_loop(run, device="cpu")
    if loop is None:
        raise ValueError(f"{run.path}: no recipe of rein's began it; load its agent, and use rein.integrations.plot")
    agent, environment = loop.parts["agent"], loop.parts["environment"]
    online = getattr(getattr(agent, "networks", None), "online", None)
    if online is None:
        raise ValueError(f"{run.path}: {type(agent).__name__} has no values of actions")
    load(agent, checkpoint.path, only=["networks"])

    @torch.no_grad()
    def look(target: tuple[int, int]) -> np.ndarray[Any, Any]:
        cells = np.ndindex(size, size)
        seen = torch.cat([environment.encode(x=x, y=y, target=target) for x, y in cells])
        return online(online.preprocess(seen)).numpy().reshape(size, size, -1)

    return look


def _check_gridworld(run: Run) -> None:
    kind = part_type(run, "environment") or "another"
    if kind != _GRIDWORLD:
        raise ValueError(f"{run.path}: paths and values are drawn of the Gridworld; this run was in {kind}")


def _show() -> None:
    from matplotlib import pyplot

    pyplot.show()


def _write(figure: Any, path: Path) -> None:
    """Write a picture whole or not at all, and say where. Raises ValueError for an ending that is no picture's."""
    image = io.BytesIO()
    figure.savefig(image, format=path.suffix.removeprefix(".") or "png", dpi=150)
    write_whole(path, image.getbuffer())
    say(f"the picture is {path}")


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
