"""Learning curves: what the metrics of a run, and a checkpoint, show when a viewer opens them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import h5py
import numpy as np

from rein.loop.clocks import CLOCKS
from rein.store.format.files import FORMAT
from rein.store.format.objects import add_dataset, add_group, add_text, encode_name, set_attributes
from rein.store.format.views import makes_a_line, write_view

_FIRST = ("evaluation_return", "episode_return")  # the curves to open with, where they are there
_NO_METRICS = ("epoch", "status", *CLOCKS)


class _Column(NamedTuple):
    """Numbers of a table, and where they have been written."""

    dataset: h5py.Dataset
    values: np.ndarray
    title: str


def write_learning_curves(
    file: h5py.File, epochs: Mapping[str, np.ndarray], evaluations: Mapping[str, np.ndarray]
) -> None:
    """Fill `file` with the columns of `metrics.csv` and `evaluations.csv`, opening with the return over env steps."""
    set_attributes(file, NX_class="NXroot", creator="rein", rein_format=FORMAT)
    entry = add_group(file, "entry", "NXentry")
    views = add_group(entry, "views", "NXcollection")
    _write_columns(entry, "evaluations", evaluations)
    shown = _draw_metrics(views, _write_columns(entry, "epochs", epochs))
    if shown:
        default = next(name for name in (*reversed(_FIRST), *shown) if name in shown)
        set_attributes(file, default="entry")
        set_attributes(views, default=default)
        set_attributes(entry, default=f"views/{default}")


def write_plot(entry: h5py.Group, state: Any, datasets: Mapping[tuple[str, ...], h5py.Dataset]) -> None:
    """Views of every metric of the state's `history` over epochs, else of the largest tensor of numbers.

    Weights are heat-maps, each where it lies.
    """
    for dataset in datasets.values():
        if dataset.ndim > 1 and dataset.dtype.kind == "f" and min(dataset.shape[-2:]) > 1:
            set_attributes(dataset, interpretation="image")  # silx would show a table
    history = state.get("history") if isinstance(state, Mapping) else None
    views = add_group(entry, "views", "NXcollection")
    default = _write_curves(entry, views, history) if isinstance(history, list) and len(history) > 1 else None
    default = default or _write_largest(views, datasets)
    if default is not None:
        set_attributes(views, default=default)
        set_attributes(entry, default=f"views/{default}")


def _write_curves(entry: Any, views: Any, history: list[Mapping[str, Any]]) -> str | None:
    group = add_group(entry, "history", "NXcollection")
    numbers = np.array([record["epoch"] for record in history], np.int64)
    epoch = _write_column(group, "epoch", numbers, "epoch")
    if not makes_a_line(numbers):
        return None
    shown = []
    metrics = add_group(group, "metrics", "NXcollection")
    for name in dict.fromkeys(name for record in history for name in record["metrics"]):
        values = np.array([record["metrics"].get(name, np.nan) for record in history], np.float64)
        column = _write_column(metrics, name, values, name)
        if _draw(views, encode_name(name), column, "epoch", epoch, f"{name}, until this checkpoint"):
            shown.append(encode_name(name))
    return next((name for name in (*_FIRST, *shown) if name in shown), None)


def _write_columns(entry: h5py.Group, name: str, columns: Mapping[str, np.ndarray]) -> dict[str, _Column]:
    """A dataset for each column, by the column's name."""
    group, written = add_group(entry, name, "NXcollection"), {}
    for column, values in columns.items():
        counts = column in ("epoch", "evaluation", *CLOCKS) and bool(np.equal(values, np.floor(values)).all())
        values = values.astype(np.int64) if counts and column != "seconds" else values
        title = column.replace("_", " ") if column in CLOCKS else column
        written[column] = _write_column(group, column, values, title)
    return written


def _write_column(group: h5py.Group, name: str, values: np.ndarray, title: str) -> _Column:
    column = _Column(add_dataset(group, encode_name(name), values), values, title)
    set_attributes(column.dataset, long_name=title)
    return column


def _draw_metrics(views: h5py.Group, columns: Mapping[str, _Column]) -> list[str]:
    """A view of each metric over env steps; over epochs where no environment was stepped."""
    axes = ("env_steps", "epoch")
    axis = next((name for name in axes if name in columns and makes_a_line(columns[name].values)), None)
    if axis is None:
        return []

    def draw(name: str) -> bool:
        return _draw(views, encode_name(name), columns[name], axis, columns[axis], f"{name} over {axis}")

    return [encode_name(name) for name in columns if name not in _NO_METRICS and draw(name)]


def _draw(views: h5py.Group, name: str, column: _Column, axis_name: str, axis: _Column, title: str) -> bool:
    """A view of a column over an axis, if there is a line to draw; of its own numbers where gaps would hide it."""
    known = np.isfinite(column.values)
    if known.sum() < 2:
        return False
    signal = f"{name}_metric" if name in (axis_name, "title") else name
    if known.all():
        write_view(views, name, signal, column.dataset, {axis_name: axis.dataset}, title)
        return True
    view = add_group(views, name, "NXdata", signal=signal, axes=[axis_name])
    add_text(view, "title", title)
    for link, whole in ((signal, column), (axis_name, axis)):
        set_attributes(add_dataset(view, link, whole.values[known]), long_name=whole.title)
    return True


def _write_largest(views: h5py.Group, datasets: Mapping[tuple[str, ...], h5py.Dataset]) -> str | None:
    drawn = {path: dataset for path, dataset in datasets.items() if dataset.ndim and dataset.size and path}
    floats = {path: dataset for path, dataset in drawn.items() if dataset.dtype.kind == "f"} or drawn
    if not floats:
        return None
    path = max(floats, key=lambda path: int(np.prod(floats[path].shape)))
    write_view(views, "largest", "tensor", floats[path], {}, ".".join(path))
    return "largest"
