"""Learning curves: a metric over a clock, and for runs that differ by their seeds their mean with its uncertainty.

Shapes: K points of a curve, S curves (one a seed), X points of a band, R resamples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from rein.integrations.plot.figures import COLOURS, STYLES, readable, short_number
from rein.ops.random import generator

_POINTS = 500  # of a band: more than a screen shows
_UNITS = {
    "env_steps": "env steps (all environments together)",
    "vector_steps": "vector steps (of every environment)",
    "updates": "updates (optimizer steps)",
    "seconds": "seconds of running",
}
_MEANINGS = {"return": "sum of rewards", "length": "steps"}


class Curve(NamedTuple):
    """A metric of one run wherever it is known, in the order of the clock."""

    x: np.ndarray  # (K,) float64
    y: np.ndarray  # (K,) float64


class Band(NamedTuple):
    """The mean of some curves where all of them are known, and the interval in which it lies."""

    x: np.ndarray  # (X,)
    mean: np.ndarray  # (X,)
    low: np.ndarray  # (X,)
    high: np.ndarray  # (X,)


def curve_of(clock: np.ndarray, metric: np.ndarray) -> Curve:
    """The curve of two columns (E,) of epochs, as `run.epochs["clocks"]` and `["metrics"]` hold them.

    Where either is no finite number there is no point: an evaluation is not in every epoch.
    """
    known = np.isfinite(clock) & np.isfinite(metric)
    order = np.argsort(clock[known], kind="stable")
    return Curve(clock[known][order].astype(np.float64), metric[known][order].astype(np.float64))


def band(curves: Sequence[Curve], *, level: float = 0.95, resamples: int = 2000, seed: int = 0) -> Band:
    """The mean of the curves and its bootstrap interval over them: S curves drawn anew with replacement, R times.

    The interval is that of the percentiles (Efron 1979) at each point by itself; between its points a curve is a line.
    The band reaches as far as all curves do, and has no points where they have nothing in common.

    Raises ValueError for a curve without a point.
    """
    if not curves or any(not len(curve.x) for curve in curves):
        raise ValueError("band(curves): give curves that have points")
    first, last = max(curve.x[0] for curve in curves), min(curve.x[-1] for curve in curves)
    x = np.unique(np.concatenate([curve.x for curve in curves]))
    x = x[(x >= first) & (x <= last)]
    x = x[np.unique(np.linspace(0, len(x) - 1, min(len(x), _POINTS)).round().astype(np.int64))] if len(x) else x
    y_SX = np.stack([np.interp(x, curve.x, curve.y) for curve in curves])
    count = len(curves)
    drawn_RS = torch.randint(count, (resamples, count), generator=generator(seed, "bootstrap"), device="cpu").numpy()
    weight_RS = np.stack([np.bincount(drawn_S, minlength=count) for drawn_S in drawn_RS]) / count
    low, high = np.quantile(weight_RS @ y_SX, [(1.0 - level) / 2.0, (1.0 + level) / 2.0], axis=0)
    return Band(x, y_SX.mean(0), low, high)


def draw_curves(
    axes: Any, curves: Mapping[str, Sequence[Curve]], *, metric: str, clock: str = "env_steps", level: float = 0.95
) -> None:
    """Draw one line for each label: the curve, or the mean of several with a band and each of them thin behind it.

    Raises ValueError where a label has no curve, or one without a point.
    """
    for index, (label, group) in enumerate(curves.items()):
        colour, style = COLOURS[index % len(COLOURS)], STYLES[index % len(STYLES)]
        how = {"color": colour, "linestyle": style, "marker": "o" if max(len(c.x) for c in group) < 2 else ""}
        if len(group) == 1:
            axes.plot(*group[0], label=readable(label), linewidth=1.8, **how)
            continue
        for curve in group:
            axes.plot(*curve, color=colour, linewidth=0.7, alpha=0.35)
        found = band(group, level=level)
        axes.fill_between(found.x, found.low, found.high, color=colour, alpha=0.2, linewidth=0)
        axes.plot(found.x, found.mean, label=f"{readable(label)} ({len(group)} seeds)", linewidth=1.8, **how)
    axes.set_xlabel(_UNITS.get(clock, clock.replace("_", " ")))
    axes.set_ylabel(_named(metric))
    axes.xaxis.set_major_formatter(short_number)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    if any(len(group) > 1 for group in curves.values()):
        axes.set_title(f"mean over seeds, {level:.0%} bootstrap interval; thin: single runs", fontsize="medium")


def _named(metric: str) -> str:
    """A metric with its unit, where its name says what it counts."""
    meaning = next((text for word, text in _MEANINGS.items() if word in metric.split("_")), None)
    plain = readable(metric.replace("_", " "))
    plain = plain.removesuffix(" 100") + ", mean of the last 100" if plain.endswith(" 100") else plain
    return f"{plain} ({meaning})" if meaning else plain
