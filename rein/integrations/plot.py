"""Plots with matplotlib: learning curves, fields of an episode, and paths and values on the Gridworld.

Every function draws on the axes that it receives, so plots can be part of any figure. matplotlib is the extra `plot`.

Shapes of curves: K points, S curves (one per seed), X points of a band, R resamples.
Shapes of episodes: L steps, K numbers per step, H, W and C of an image.
Shapes of the Gridworld: X columns, Y rows, A actions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from rein.errors import optional_import
from rein.ops.random import generator

# Okabe & Ito 2008: distinguishable with color blindness; line styles distinguish curves in grayscale
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
STYLES = ("-", "--", "-.", ":")
SCALE = "cividis"  # color map for color-blind readers, from dark to light
_PAPER = ("agg", "cairo", "pdf", "pgf", "ps", "svg", "template")  # backends without windows


def make_figure(width: float, height: float, *, on_screen: bool = False) -> Any:
    """Return a figure of the given size in inches. With `on_screen`, `matplotlib.pyplot.show()` shows it.

    Raises ImportError without the extra `plot`.
    """
    _require()
    if on_screen:
        from matplotlib import pyplot

        return pyplot.figure(figsize=(width, height), layout="constrained")
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def has_screen() -> bool:
    """Return whether matplotlib can open a window. Raises ImportError without the extra `plot`."""
    _require()
    from matplotlib import pyplot

    return pyplot.get_backend().lower() not in _PAPER


def readable(text: str) -> str:
    """Return text from a file as a label without formulas and characters that cannot be printed."""
    return "".join(character if character.isprintable() else "?" for character in text).replace("$", r"\$")


def short_number(value: float, _: Any = None) -> str:
    """Format a tick label of large counts: 1500000 is 1.5M."""
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= unit:
            return f"{value / unit:.4g}{name}"
    return f"{value:.4g}"


def _require() -> None:
    with optional_import("plots need matplotlib: pip install matplotlib"):
        import matplotlib  # noqa: F401  # tests whether it is installed


_BAND_POINTS = 500  # points of a band, more than a screen can show
_UNITS = {
    "env_steps": "env steps (all environments together)",
    "vector_steps": "vector steps (of every environment)",
    "updates": "updates (optimizer steps)",
    "seconds": "seconds of running",
}
_MEANINGS = {"return": "sum of rewards", "length": "steps"}


class Curve(NamedTuple):
    """Finite values of a metric of one run, in order of the clock."""

    x: np.ndarray  # (K,) float64
    y: np.ndarray  # (K,) float64


class Band(NamedTuple):
    """Mean of several curves with its confidence interval."""

    x: np.ndarray  # (X,)
    mean: np.ndarray  # (X,)
    low: np.ndarray  # (X,)
    high: np.ndarray  # (X,)


def curve_of(clock: np.ndarray, metric: np.ndarray) -> Curve:
    """Return the curve of two columns (E,), such as those of `run.epochs["clocks"]` and `run.epochs["metrics"]`.

    Epochs in which either is not finite are left out, for instance epochs without an evaluation.
    """
    finite = np.isfinite(clock) & np.isfinite(metric)
    order = np.argsort(clock[finite], kind="stable")
    return Curve(clock[finite][order].astype(np.float64), metric[finite][order].astype(np.float64))


def band(curves: Sequence[Curve], *, level: float = 0.95, resamples: int = 2000, seed: int = 0) -> Band:
    """Return the mean of the curves and its bootstrap confidence interval over the S curves, from R resamples.

    The interval is the pointwise percentile interval (Efron 1979). Curves are interpolated linearly. The band begins
    where all curves have begun, and ends with the longest one. A curve that ends earlier, for instance because its run
    was solved, keeps its last value. Otherwise, the mean would change when a run ends.

    Raises ValueError for a curve without points.
    """
    if not curves or any(not len(curve.x) for curve in curves):
        raise ValueError("band(curves): a curve has no points; leave it out")
    x = np.unique(np.concatenate([curve.x for curve in curves]))
    x = x[x >= max(curve.x[0] for curve in curves)]
    x = x[np.unique(np.linspace(0, len(x) - 1, min(len(x), _BAND_POINTS)).round().astype(np.int64))]
    y_SX = np.stack([np.interp(x, curve.x, curve.y) for curve in curves])
    count = len(curves)
    drawn_RS = torch.randint(count, (resamples, count), generator=generator(seed, "bootstrap"), device="cpu").numpy()
    weight_RS = np.stack([np.bincount(drawn_S, minlength=count) for drawn_S in drawn_RS]) / count
    low, high = np.quantile(weight_RS @ y_SX, [(1.0 - level) / 2.0, (1.0 + level) / 2.0], axis=0)
    return Band(x, y_SX.mean(0), low, high)


def draw_curves(
    axes: Any, curves: Mapping[str, Sequence[Curve]], *, metric: str, clock: str = "env_steps", level: float = 0.95
) -> None:
    """Draw one line per label: a single curve, or the mean of several with its band and thin single curves.

    A dotted line continues a curve that ends before the longest one of its label, as in the mean, see `band`.

    Raises ValueError if a label has no curve, or a curve without points.
    """
    held = False
    for index, (label, group) in enumerate(curves.items()):
        colour, style = COLOURS[index % len(COLOURS)], STYLES[index % len(STYLES)]
        how = {"color": colour, "linestyle": style, "marker": "o" if max(len(c.x) for c in group) < 2 else ""}
        if len(group) == 1:
            axes.plot(*group[0], label=readable(label), linewidth=1.8, **how)
            continue
        mean_band = band(group, level=level)
        last = max(curve.x[-1] for curve in group)
        for curve in group:
            axes.plot(*curve, color=colour, linewidth=0.7, alpha=0.35)
            if curve.x[-1] < last:
                ends = [curve.x[-1], last], [curve.y[-1]] * 2
                axes.plot(*ends, ":o", color=colour, linewidth=1.2, alpha=0.8, markersize=4, markevery=[0])
                held = True
        axes.fill_between(mean_band.x, mean_band.low, mean_band.high, color=colour, alpha=0.2, linewidth=0)
        axes.plot(mean_band.x, mean_band.mean, label=f"{readable(label)} ({len(group)} seeds)", linewidth=1.8, **how)
    axes.set_xlabel(_UNITS.get(clock, clock.replace("_", " ")))
    axes.set_ylabel(_named(metric))
    axes.xaxis.set_major_formatter(short_number)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    if any(len(group) > 1 for group in curves.values()):
        title = f"mean over seeds, {level:.0%} bootstrap interval; thin: single runs"
        note = "\ndots: runs that ended earlier, and keep their last value in the mean (dotted)" if held else ""
        axes.set_title(title + note, fontsize="medium")


def _named(metric: str) -> str:
    """Return the name of a metric, with its unit if the name determines it."""
    meaning = next((text for word, text in _MEANINGS.items() if word in metric.split("_")), None)
    plain = readable(metric.replace("_", " "))
    plain = plain.removesuffix(" 100") + ", mean of the last 100" if plain.endswith(" 100") else plain
    return f"{plain} ({meaning})" if meaning else plain


_LINES = 8  # maximum number of lines; more numbers are drawn as a colour map
_NAMED = 24  # maximum number of rows of a colour map with labels
_SHOWN = 8  # images per episode
_GAP = 4  # pixels between two images


def draw_field(axes: Any, values: np.ndarray[Any, Any], name: str) -> None:
    """Draw a field (L, ...) of an episode, such as `run.episode(3).fields["observation"]`.

    Up to eight numbers per step are drawn as lines, and integers and flags as step functions. Images are uint8 with two
    dimensions, or with 1, 3 or 4 channels in the first or last dimension. They are shown at equal intervals, in colour,
    or as the newest of stacked frames. Other fields are drawn as a colour map, with each number scaled to its range.

    Raises ValueError for an episode without steps.
    """
    if not len(values):
        raise ValueError(f"{name}: the episode has no steps")
    pictures_LHW = _pictures(values)
    if pictures_LHW is not None:
        _draw_pictures(axes, pictures_LHW, name)
        return
    flat_LK = values.reshape(len(values), -1)
    if flat_LK.shape[1] > _LINES:
        _draw_map(axes, flat_LK, name)
    else:
        _draw_lines(axes, flat_LK, name)
    axes.set_xlabel("step of the episode")


def _draw_lines(axes: Any, values_LK: np.ndarray[Any, Any], name: str) -> None:
    whole = values_LK.dtype.kind in "biu"
    count = values_LK.shape[1]
    for k in range(count):
        axes.plot(
            np.arange(len(values_LK)),
            values_LK[:, k].astype(np.float64),
            drawstyle="steps-mid" if whole else "default",
            color=COLOURS[k % len(COLOURS)],
            linestyle=STYLES[k % len(STYLES)],
            marker="o" if len(values_LK) == 1 else "",
            linewidth=1.5,
            label=f"[{k}]",
        )
    axes.set_ylabel(readable(name))
    axes.grid(alpha=0.25)
    if whole:
        _whole_ticks(axes.yaxis)
    _whole_ticks(axes.xaxis)
    if count > 1:
        axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))  # beside the plot


def _draw_map(axes: Any, values_LK: np.ndarray[Any, Any], name: str) -> None:
    """Draw a colour map. Each number is scaled to its own range, because the numbers have no common unit."""
    from matplotlib.cm import ScalarMappable

    plain_KL = values_LK.T.astype(np.float64)
    low_K, high_K = np.fmin.reduce(plain_KL, 1), np.fmax.reduce(plain_KL, 1)
    shade_KL = (plain_KL - low_K[:, None]) / np.where(high_K > low_K, high_K - low_K, 1.0)[:, None]
    axes.imshow(shade_KL, aspect="auto", interpolation="nearest", cmap=SCALE, vmin=0.0, vmax=1.0)
    axes.set_ylabel(readable(name))
    _whole_ticks(axes.xaxis)
    _whole_ticks(axes.yaxis)
    if len(low_K) <= _NAMED:
        labels = [f"[{k}]  {low:.3g} to {high:.3g}" for k, (low, high) in enumerate(zip(low_K, high_K, strict=True))]
        axes.set_yticks(range(len(labels)), labels, fontsize="small")
    bar = axes.figure.colorbar(ScalarMappable(cmap=SCALE), ax=axes, ticks=[0.0, 1.0])
    bar.ax.set_yticklabels(["minimum", "maximum"])


def _draw_pictures(axes: Any, pictures: np.ndarray[Any, Any], name: str) -> None:
    chosen = np.unique(np.linspace(0, len(pictures) - 1, min(_SHOWN, len(pictures))).round().astype(np.int64))
    height, width = pictures.shape[1:3]
    columns = min(4, len(chosen))
    rows = -(-len(chosen) // columns)
    above = max(_GAP, height // 7)  # room for the step
    pitch = height + above, width + _GAP
    sheet = np.full((rows * pitch[0], columns * pitch[1] - _GAP, *pictures.shape[3:]), 255, np.uint8)
    for place, step in enumerate(chosen):
        top, left = place // columns * pitch[0] + above, place % columns * pitch[1]
        sheet[top : top + height, left : left + width] = pictures[step]
        axes.text(left, top - 1, f"step {step}", va="bottom", ha="left", fontsize="small")
    axes.imshow(sheet, cmap="gray", vmin=0, vmax=255, interpolation="nearest")
    axes.set_axis_off()
    axes.set_title(readable(name))


def _pictures(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any] | None:
    """Return images (L, H, W) or (L, H, W, 3), or None if the field does not contain images."""
    if values.dtype != np.uint8 or values.ndim not in (3, 4) or min(values.shape[1:3]) == 0:
        return None
    if values.ndim == 3:
        return values
    if values.shape[3] in (1, 3, 4):
        return values if values.shape[3] == 3 else values[..., -1]
    if values.shape[1] in (1, 3, 4):
        return np.moveaxis(values, 1, -1) if values.shape[1] == 3 else values[:, -1]
    return None


def _whole_ticks(axis: Any) -> None:
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


_ARROWS = np.array([(0, 1), (0, -1), (1, 0), (-1, 0)])  # up, down, right, left: the actions of Gridworld
_CORNERS = np.array([(-0.5, -0.5), (0.5, -0.5), (0.5, 0.5), (-0.5, 0.5)])
_SIDES = ((3, 2), (0, 1), (1, 2), (0, 3))  # corners of the triangle of each action
_SPREAD = 0.5  # fraction of a cell over which parallel paths are spread
_TARGET = "#F0E442"  # the colour of Okabe & Ito that paths do not use


def draw_paths(
    axes: Any, paths: Mapping[str, np.ndarray[Any, Any]], *, targets: Sequence[tuple[int, int]], size: int = 5
) -> None:
    """Draw the paths (L + 1, 2) of episodes on a board of `size` x `size` cells. A dot marks the start of each path.

    Up to seven paths have distinct colours and labels. More paths are coloured from dark to light in order.
    """
    _board(axes, size, targets)
    count = len(paths)
    for index, (label, path_L2) in enumerate(paths.items()):
        shift = _SPREAD * (index / (count - 1) - 0.5) if count > 1 else 0.0
        place_L2 = path_L2 + shift
        move_L2 = np.diff(path_L2, axis=0)
        moved = np.abs(move_L2).sum(1) > 0  # moves against the edge have no effect
        named = count <= len(COLOURS)
        colour = COLOURS[index] if named else _of_scale(0.9 * index / (count - 1))
        how = {"angles": "xy", "scale_units": "xy", "scale": 1.0, "width": 0.006, "color": colour, "zorder": 3}
        axes.quiver(*place_L2[:-1][moved].T, *move_L2[moved].T, **how)
        axes.plot(*place_L2[0], "o", color=colour, markersize=6, zorder=4, label=readable(label) if named else None)
    if count > len(COLOURS):
        first, *_, last = paths
        _draw_scale(axes, readable(first), readable(last))
    _legend(axes, beside=count <= len(COLOURS))


def draw_values(
    axes: Any, values_XYA: np.ndarray[Any, Any], *, target: tuple[int, int], scale: tuple[float, float] | None = None
) -> None:
    """Draw the action values of each cell, with one triangle per action and an arrow for the best action.

    `scale` is the range of values of the colour map. The target cell, in which episodes end, has no values.
    """
    from matplotlib.collections import PolyCollection
    from matplotlib.colors import Normalize

    size = len(values_XYA)
    low, high = scale or _range(values_XYA, target)
    _board(axes, size, [target])
    triangles, shown = [], []
    for x, y in np.ndindex(size, size):
        if (x, y) == tuple(target):
            continue
        corners = _CORNERS + np.array([x, y])
        for action, (start, end) in enumerate(_SIDES):
            triangles.append([corners[start], corners[end], (x, y)])
            shown.append(values_XYA[x, y, action])
        _write_values(axes, (x, y), values_XYA[x, y], (low, high))
    how = {"cmap": SCALE, "norm": Normalize(low, high), "edgecolors": "white", "linewidths": 0.6}
    colours = PolyCollection(triangles, array=np.array(shown), **how)
    axes.add_collection(colours)
    axes.figure.colorbar(colours, ax=axes, label="Q value (discounted sum of rewards)", shrink=0.8)
    _legend(axes, beside=False)


def _write_values(axes: Any, cell: tuple[int, int], value_A: np.ndarray[Any, Any], scale: tuple[float, float]) -> None:
    best = int(np.argmax(value_A))
    for action, value in enumerate(value_A):
        side_2 = _ARROWS[action] * np.array([0.3, 0.38])
        shade = (value - scale[0]) / max(scale[1] - scale[0], 1e-12)
        colour = "black" if shade > 0.5 else "white"
        weight = "bold" if action == best else "normal"
        text = f"{round(float(value), 1) + 0.0:.1f}"  # avoids -0.0
        axes.text(*(cell + side_2), text, ha="center", va="center", fontsize=7, color=colour, weight=weight)
    start_2, move_2 = cell - 0.11 * _ARROWS[best], 0.22 * _ARROWS[best]
    how = {"angles": "xy", "scale_units": "xy", "scale": 1.0, "width": 0.009, "zorder": 4, "headlength": 4}
    axes.quiver(*start_2, *move_2, color="white", edgecolor="black", linewidth=0.8, headaxislength=4, **how)


def _board(axes: Any, size: int, targets: Sequence[tuple[int, int]]) -> None:
    for edge in np.arange(size + 1) - 0.5:
        axes.plot([edge, edge], [-0.5, size - 0.5], color="0.75", linewidth=0.8, zorder=1)
        axes.plot([-0.5, size - 0.5], [edge, edge], color="0.75", linewidth=0.8, zorder=1)
    target_K2 = np.array(targets).reshape(-1, 2)
    axes.plot(*target_K2.T, "*", color=_TARGET, markeredgecolor="black", markersize=20, zorder=2, label="target")
    axes.set(xlim=(-0.5, size - 0.5), ylim=(-0.5, size - 0.5), aspect="equal", xlabel="x (column)", ylabel="y (row)")
    axes.set_xticks(range(size))
    axes.set_yticks(range(size))


def _legend(axes: Any, *, beside: bool) -> None:
    """Draw the legend beside the board, or below it if there is a colour bar."""
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0) if beside else (0.0, -0.08))


def _range(values_XYA: np.ndarray[Any, Any], target: tuple[int, int]) -> tuple[float, float]:
    counted = np.ones(values_XYA.shape[:2], bool)
    counted[tuple(target)] = False
    return float(values_XYA[counted].min()), float(values_XYA[counted].max())


def _of_scale(share: float) -> Any:
    import matplotlib

    return matplotlib.colormaps[SCALE](share)


def _draw_scale(axes: Any, first: str, last: str) -> None:
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import ListedColormap

    colours = ListedColormap([_of_scale(0.9 * share) for share in np.linspace(0.0, 1.0, 64)])
    bar = axes.figure.colorbar(ScalarMappable(cmap=colours), ax=axes, shrink=0.8, ticks=[0.0, 1.0])
    bar.ax.set_yticklabels([first, last])
