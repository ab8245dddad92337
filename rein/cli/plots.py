"""`rein plot`: learning curves, fields and paths of episodes, and action values on the Gridworld."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import tyro

from rein.cli.rebuild import environment_of, part_type, recipe_loop
from rein.cli.terminal import printable, say
from rein.envs.gridworld import Gridworld
from rein.files import absolute, short
from rein.integrations.learning_curves import Clock, choose_metric, draw_learners, grouped, read_all, read_learners
from rein.integrations.plot import draw_curves, draw_field, draw_paths, draw_values, has_screen, make_figure
from rein.store.checkpoint_file import Checkpoint
from rein.store.format.sealed import write_whole
from rein.store.loading import find as find_checkpoint
from rein.store.loading import load
from rein.store.reader import Run, open_run
from rein.types import Episode, Tree

_LAST = 7  # default number of episodes with --paths
_BOARDS = 6
_GRIDWORLD = f"{Gridworld.__module__}.{Gridworld.__qualname__}"


def plot(
    runs: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN [RUN ...]")] = (),
    *,
    metric: str | None = None,
    clock: Clock = "env_steps",
    x: str | None = None,
    episode: tuple[int, ...] = (),
    field: str | None = None,
    paths: bool = False,
    values: bool = False,
    checkpoint: Path | None = None,
    output: Path | None = None,
) -> None:
    """Plot learning curves of runs, or for one run fields of episodes, or paths and values on the Gridworld.

    With --x, plot the last return of each learner of populations over an option in which they differ.

    Runs that differ only in their seeds are one curve: their mean, with its 95% bootstrap interval. A run that ended
    earlier than the others keeps its last value in the mean.

    Args:
        runs: folders of runs.
        metric: metric of the curves. Default: the episode return.
        clock: clock of the x axis.
        x: option of the learners on the x axis, such as learning_rate. Runs of `rein train --learners`, or of a
            `rein.Population`.
        episode: numbers of the episodes whose fields or paths are plotted.
        field: field of the episodes. Default: `observation`. For a nested field give its path, `observation/camera`.
        paths: plot paths of episodes on the Gridworld, by default of the last ones.
        values: plot the action values of the agent in each cell of the Gridworld.
        checkpoint: checkpoint to load the agent from. Default: the newest one of the run.
        output: image file to write, PNG, SVG or PDF by its suffix. Default: a window if there is a screen.
    """
    folders = list(runs)
    if not folders:
        raise ValueError("rein plot RUN [RUN ...]: give the folders of one or more runs")
    of_one = paths or values or bool(episode) or field is not None
    if of_one and len(folders) > 1:
        raise ValueError(f"rein plot: fields, paths and values need a single run, got {len(folders)}")
    if x is not None and of_one:
        raise ValueError(f"rein plot: --x {x} cannot be combined with --episode, --field, --paths and --values")
    if paths + values + (field is not None) > 1:
        raise ValueError("rein plot: --field, --paths and --values cannot be combined; give one of them")
    on_screen = output is None and has_screen()
    if x is not None:
        figure, subject = _learners(folders, x, metric, on_screen)
    elif not of_one:
        figure, subject = _curves(folders, metric, clock, on_screen)
    elif values:
        figure, subject = _values(open_run(folders[0]), checkpoint, on_screen)
    elif paths:
        figure, subject = _paths(open_run(folders[0]), episode, on_screen)
    else:
        figure, subject = _fields(open_run(folders[0]), episode, field or "observation", on_screen)
    if on_screen:
        _show()
    else:
        name = printable(f"{folders[0].resolve().name}-{subject}.png")  # the subject may come from a file
        _write(figure, output or Path(name.replace("?", "_").replace("/", ".")))


def _curves(runs: Sequence[Path], metric: str | None, clock: str, on_screen: bool) -> tuple[Any, str]:
    columns = read_all(runs)
    name = choose_metric(columns, metric, clock)
    figure = make_figure(8.0, 5.0, on_screen=on_screen)
    draw_curves(figure.add_subplot(), grouped(columns, name, clock), metric=name, clock=clock)
    return figure, name


def _learners(runs: Sequence[Path], option: str, metric: str | None, on_screen: bool) -> tuple[Any, str]:
    option = option.replace("-", "_")
    learners = {str(short(run)): read_learners(absolute(run), option, metric) for run in runs}
    figure = make_figure(8.0, 5.0, on_screen=on_screen)
    draw_learners(figure.add_subplot(), learners, option=option, metric=metric)
    return figure, option


def _fields(run: Run, numbers: Sequence[int], name: str, on_screen: bool) -> tuple[Any, str]:
    if not numbers:
        raise ValueError(f"--field {name}: give the number of an episode with --episode N")
    episodes = [run.episode(number) for number in numbers]
    drawn = [(episode, *part) for episode in episodes for part in _parts(run, episode, name)]
    figure = make_figure(8.0, 3.2 * len(drawn) + 0.6, on_screen=on_screen)
    for axes, (episode, path, values) in zip(figure.subplots(len(drawn), squeeze=False)[:, 0], drawn, strict=True):
        draw_field(axes, np.asarray(values), path)
        axes.set_title(_title(episode, path), fontsize="medium")
    return figure, f"episode-{numbers[0]}-{name}"


def _parts(run: Run, episode: Episode, name: str) -> list[tuple[str, Any]]:
    """Return the arrays of a field with their paths. A nested field has several arrays."""
    every = dict(_by_path(episode.fields))
    parts = [(path, array) for path, array in every.items() if path == name or path.startswith(f"{name}/")]
    if not parts:
        raise ValueError(f"{run.path}: no field {name!r}; the fields are {', '.join(every)}")
    return parts


def _by_path(tree: Tree, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield all arrays with their paths as in `run.fields`. Names may contain ".", but not "/"."""
    for name, value in tree.items():
        inner = f"{path}/{name}" if path else name
        yield from _by_path(value, inner) if isinstance(value, Mapping) else [(inner, value)]


def _title(episode: Episode, path: str) -> str:
    end = "terminated" if episode.terminated else "truncated"
    return f"{path} of episode {episode.id} (return {episode.episode_return:.6g}, {episode.length:,} steps, {end})"


def _paths(run: Run, numbers: Sequence[int], on_screen: bool) -> tuple[Any, str]:
    _check_gridworld(run)
    numbers = numbers or run.episodes["id"][run.episodes["whole"]][-_LAST:].tolist()
    if not numbers:
        raise ValueError(f"{run.path}: no complete episode is stored")
    size = environment_of(run).size
    places = {}
    targets = set()
    for number in numbers:
        places[f"episode {number}"], target = _path_of(run, number, size)
        targets.add(target)
    figure = make_figure(7.5, 5.5, on_screen=on_screen)
    axes = figure.add_subplot()
    draw_paths(axes, places, targets=sorted(targets), size=size)
    axes.set_title(f"paths of {len(numbers)} episode{'s' * (len(numbers) != 1)}", fontsize="medium")
    return figure, "paths"


def _path_of(run: Run, number: int, size: int) -> tuple[np.ndarray[Any, Any], tuple[int, int]]:
    """Return the positions of an episode at each step and at its end, (L + 1, 2), and its target."""
    episode = run.episode(number)
    seen = episode.fields.get("observation")
    final = episode.final_observation
    if seen is None or final is None:
        raise ValueError(f"{run.path}: observations were not stored, so paths cannot be plotted")
    seen = np.concatenate([seen, np.asarray(final)[None]])
    if seen.ndim != 2 or seen.shape[1] not in (4, 6):
        raise ValueError(f"{run.path}: observations of shape {seen.shape[1:]} are not from a Gridworld")
    cells = seen[:, :4] if seen.shape[1] == 4 else np.rint(seen[:, :4] * (size - 1))
    x, y = (int(place) for place in cells[0, 2:])
    return cells[:, :2].astype(np.int64), (x, y)


def _values(run: Run, checkpoint: Path | None, on_screen: bool) -> tuple[Any, str]:
    _check_gridworld(run)
    saved = find_checkpoint(checkpoint or run.path)
    board_of = environment_of(run)
    targets = board_of.possible_targets
    look = _values_of(run, saved, board_of.size)
    if len(targets) > _BOARDS:
        raise ValueError(f"{run.path}: has {len(targets)} targets; at most {_BOARDS} can be plotted")
    boards = [look(target) for target in targets]
    figure = make_figure(7.0 * len(boards), 6.0, on_screen=on_screen)
    for axes, target, board in zip(figure.subplots(1, len(boards), squeeze=False)[0], targets, boards, strict=True):
        draw_values(axes, board, target=target)
        axes.set_title(f"{saved.path.stem}: action values; arrow: best action", fontsize="medium")
    return figure, "values"


def _values_of(run: Run, checkpoint: Checkpoint, size: int) -> Callable[[tuple[int, int]], np.ndarray[Any, Any]]:
    """Return a function from a target to the values (X, Y, A) of all cells, from a table or from networks."""
    state = checkpoint.state.get("parts", {}).get("agent", {})
    table = state.get("table")
    if isinstance(table, torch.Tensor) and len(table) == size**4:
        table_XYXYA = table.numpy().reshape(*[size] * 4, -1)
        return lambda target: table_XYXYA[:, :, *target]
    loop = recipe_loop(run, device="cpu")
    if loop is None:
        raise ValueError(f"{run.path}: not trained by a recipe of rein; load the agent and use rein.integrations.plot")
    agent = loop.parts["agent"]
    environment = loop.parts["environment"]
    online = getattr(getattr(agent, "networks", None), "online", None)
    if online is None:
        raise ValueError(f"{run.path}: {type(agent).__name__} has no action values")
    load(agent, checkpoint.path, only=["networks"])

    @torch.no_grad()
    def look(target: tuple[int, int]) -> np.ndarray[Any, Any]:
        cells = np.ndindex(size, size)
        seen = torch.cat([environment.encode(x=x, y=y, target=target) for x, y in cells])
        return online(online.preprocess(seen)).numpy().reshape(size, size, -1)

    return look


def _check_gridworld(run: Run) -> None:
    kind = part_type(run, "environment") or "an unknown environment"
    if kind != _GRIDWORLD:
        raise ValueError(f"{run.path}: --paths and --values need a run in the Gridworld, not in {kind}")


def _show() -> None:
    from matplotlib import pyplot

    pyplot.show()


def _write(figure: Any, path: Path) -> None:
    """Write an image atomically and print its path. Raises ValueError for an unknown image suffix."""
    image = io.BytesIO()
    figure.savefig(image, format=path.suffix.removeprefix(".") or "png", dpi=150)
    write_whole(path, image.getbuffer())
    say(f"wrote {path}")
