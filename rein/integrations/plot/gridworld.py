"""The Gridworld's board: the paths of episodes, and what an agent takes each action to be worth.

Shapes: L moves of an episode, X and Y the columns and rows of the board, A actions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rein.integrations.plot.figures import COLOURS, SCALE, readable

_ARROWS = np.array([(0, 1), (0, -1), (1, 0), (-1, 0)])  # up, down, right, left: as the Gridworld counts them
_CORNERS = np.array([(-0.5, -0.5), (0.5, -0.5), (0.5, 0.5), (-0.5, 0.5)])
_SIDES = ((3, 2), (0, 1), (1, 2), (0, 3))  # the corners that the triangle of an action has
_SPREAD = 0.5  # of a cell, over which paths are laid side by side
_TARGET = "#F0E442"  # the one colour of Okabe & Ito that no path has


def draw_paths(
    axes: Any, paths: Mapping[str, np.ndarray[Any, Any]], *, targets: Sequence[tuple[int, int]], size: int = 5
) -> None:
    """Draw the paths (L + 1, 2) of episodes over a board of `size` x `size` cells, side by side, each from its dot.

    Up to seven have a colour each, and their labels beside the board; more go from dark to light in their order.
    """
    _board(axes, size, targets)
    count = len(paths)
    for index, (label, path_L2) in enumerate(paths.items()):
        shift = _SPREAD * (index / (count - 1) - 0.5) if count > 1 else 0.0
        place_L2 = path_L2 + shift
        move_L2 = np.diff(path_L2, axis=0)
        moved = np.abs(move_L2).sum(1) > 0  # against the edge it stays
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
    """Draw what each action is worth in each cell, in the triangle that points its way, with an arrow for the best.

    `scale` are the values of the darkest and the lightest colour. The target's cell, where episodes end, has none.
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
        text = f"{round(float(value), 1) + 0.0:.1f}"  # never -0.0
        axes.text(*(cell + side_2), text, ha="center", va="center", fontsize=7, color=colour, weight=weight)
    start_2, move_2 = cell - 0.11 * _ARROWS[best], 0.22 * _ARROWS[best]
    how = {"angles": "xy", "scale_units": "xy", "scale": 1.0, "width": 0.009, "zorder": 4, "headlength": 4}
    axes.quiver(*start_2, *move_2, color="white", edgecolor="black", linewidth=0.8, headaxislength=4, **how)


def _board(axes: Any, size: int, targets: Sequence[tuple[int, int]]) -> None:
    for edge in np.arange(size + 1) - 0.5:
        axes.plot([edge, edge], [-0.5, size - 0.5], color="0.75", linewidth=0.8, zorder=1)
        axes.plot([-0.5, size - 0.5], [edge, edge], color="0.75", linewidth=0.8, zorder=1)
    where = np.array(targets).reshape(-1, 2)
    axes.plot(*where.T, "*", color=_TARGET, markeredgecolor="black", markersize=20, zorder=2, label="target")
    axes.set(xlim=(-0.5, size - 0.5), ylim=(-0.5, size - 0.5), aspect="equal", xlabel="x (column)", ylabel="y (row)")
    axes.set_xticks(range(size))
    axes.set_yticks(range(size))


def _legend(axes: Any, *, beside: bool) -> None:
    """Beside the board, or where a scale is there, below it."""
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
