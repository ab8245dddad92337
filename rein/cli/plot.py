"""`rein plot`: learning curves, fields and paths of episodes, and action values on the Gridworld."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import tyro

from rein.cli.options import arguments_of
from rein.cli.output import printable, say
from rein.cli.rebuild import environment_of, part_type, recipe_loop
from rein.envs.gridworld import Gridworld
from rein.integrations.learning_curves import Clock, choose_metric, grouped, read_all
from rein.integrations.plot import draw_curves, draw_field, draw_paths, draw_values, has_screen, make_figure
from rein.store.checkpoint_file import Checkpoint
from rein.store.format.sealed import write_whole
from rein.store.loading import find as find_checkpoint
from rein.store.loading import load
from rein.store.reader import Run, open_run
from rein.types import Episode, Tree

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
