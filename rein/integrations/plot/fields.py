"""One field of one episode over its steps: lines of few numbers, colours of many, and pictures as pictures.

Shapes: L steps, K numbers of a step, H and W of a picture, C its channels.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rein.integrations.plot.figures import COLOURS, SCALE, STYLES, readable

_LINES = 8  # more are drawn as colours
_NAMED = 24  # rows of colours that have their numbers beside them
_SHOWN = 8  # pictures of an episode
_GAP = 4  # pixels between two of them


def draw_field(axes: Any, values: np.ndarray[Any, Any], name: str) -> None:
    """Draw a field (L, ...) of an episode, such as `run.episode(3).fields["observation"]`.

    One number a step, or a few, are lines; counts and flags are steps. Pictures, uint8 of two dimensions or with 1, 3
    or 4 channels before or behind them, are shown at equal distances: in colour, or the newest of stacked frames. All
    else is a map of colours, each number from its own least to its greatest.

    Raises ValueError for an episode without a step.
    """
    if not len(values):
        raise ValueError(f"{name}: an episode without a step")
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
        axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))  # beside, never over the lines


def _draw_map(axes: Any, values_LK: np.ndarray[Any, Any], name: str) -> None:
    """Each number from its least to its greatest: what an observation is made of has no unit in common."""
    from matplotlib.cm import ScalarMappable

    plain_KL = values_LK.T.astype(np.float64)
    low_K, high_K = np.fmin.reduce(plain_KL, 1), np.fmax.reduce(plain_KL, 1)
    shade_KL = (plain_KL - low_K[:, None]) / np.where(high_K > low_K, high_K - low_K, 1.0)[:, None]
    axes.imshow(shade_KL, aspect="auto", interpolation="nearest", cmap=SCALE, vmin=0.0, vmax=1.0)
    axes.set_ylabel(readable(name))
    _whole_ticks(axes.xaxis)
    _whole_ticks(axes.yaxis)
    if len(low_K) <= _NAMED:
        told = [f"[{k}]  {low:.3g} to {high:.3g}" for k, (low, high) in enumerate(zip(low_K, high_K, strict=True))]
        axes.set_yticks(range(len(told)), told, fontsize="small")
    bar = axes.figure.colorbar(ScalarMappable(cmap=SCALE), ax=axes, ticks=[0.0, 1.0])
    bar.ax.set_yticklabels(["least", "greatest"])


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
    """Pictures (L, H, W) or (L, H, W, 3), if that is what the field is."""
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
