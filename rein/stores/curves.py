"""Learning curves: what the metrics of a run, and a checkpoint, show when a viewer opens them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import h5py
import numpy as np

from rein.stores.files import FORMAT
from rein.stores.layout import encode_name
from rein.stores.views import add_group, makes_a_line, write_view
from rein.types import CLOCKS

_FIRST = ("evaluation_return", "episode_return")  # the curves to open with, where they are there
_NO_METRICS = ("epoch", "status", *CLOCKS)


def write_learning_curves(
    file: h5py.File, epochs: Mapping[str, np.ndarray], evaluations: Mapping[str, np.ndarray]
) -> None:
    """Fill `file` with the columns of `metrics.csv` and `evaluations.csv`, opening with the return over env steps."""
    file.attrs.update(NX_class="NXroot", creator="rein", rein_format=FORMAT)
    entry = add_group(file, "entry", "NXentry")
    views = add_group(entry, "views", "NXcollection")
    _write_columns(entry, "evaluations", evaluations)
    shown = _draw_metrics(views, _write_columns(entry, "epochs", epochs))
    if shown:
        file.attrs["default"] = "entry"
        views.attrs["default"] = default = next(name for name in (*reversed(_FIRST), *shown) if name in shown)
        entry.attrs["default"] = f"views/{default}"


def write_plot(entry: h5py.Group, state: Any, datasets: Mapping[tuple[str, ...], h5py.Dataset]) -> None:
    """Views of every metric of the state's `history` over epochs, else of the largest tensor of numbers.

    Weights are heat-maps, each where it lies.
    """
    for dataset in datasets.values():
        if dataset.ndim > 1 and dataset.dtype.kind == "f" and min(dataset.shape[-2:]) > 1:
            dataset.attrs["interpretation"] = "image"  # silx would show a table
    history = state.get("history") if isinstance(state, Mapping) else None
    views = add_group(entry, "views", "NXcollection")
    default = _write_curves(entry, views, history) if isinstance(history, list) and len(history) > 1 else None
    default = default or _write_largest(views, datasets)
    if default is not None:
        views.attrs["default"] = default
        entry.attrs["default"] = f"views/{default}"


def _write_curves(entry: Any, views: Any, history: list[Mapping[str, Any]]) -> str | None:
    group: Any = add_group(entry, "history", "NXcollection")
    group["epoch"] = np.array([record["epoch"] for record in history], np.int64)
    group["epoch"].attrs["long_name"] = "epoch"
    if not makes_a_line(group["epoch"]):
        return None
    shown = []
    metrics: Any = add_group(group, "metrics", "NXcollection")
    for name in dict.fromkeys(name for record in history for name in record["metrics"]):
        values = np.array([record["metrics"].get(name, np.nan) for record in history], np.float64)
        link = encode_name(name)
        metrics[link] = values
        metrics[link].attrs["long_name"] = name
        if _draw(views, link, metrics[link], "epoch", group["epoch"], f"{name}, until this checkpoint"):
            shown.append(link)
    return next((name for name in (*_FIRST, *shown) if name in shown), None)


def _write_columns(entry: Any, name: str, columns: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """A dataset for each column, by the column's name."""
    group: Any = add_group(entry, name, "NXcollection")
    for column, values in columns.items():
        counts = column in ("epoch", "evaluation", *CLOCKS) and bool(np.equal(values, np.floor(values)).all())
        group[encode_name(column)] = values.astype(np.int64) if counts and column != "seconds" else values
        group[encode_name(column)].attrs["long_name"] = column.replace("_", " ") if column in CLOCKS else column
    return {column: group[encode_name(column)] for column in columns}


def _draw_metrics(views: Any, columns: Mapping[str, Any]) -> list[str]:
    """A view of each metric over env steps; over epochs where no environment was stepped."""
    axis = next((name for name in ("env_steps", "epoch") if name in columns and makes_a_line(columns[name])), None)
    if axis is None:
        return []

    def draw(name: str) -> bool:
        return _draw(views, encode_name(name), columns[name], axis, columns[axis], f"{name} over {axis}")

    return [encode_name(name) for name in columns if name not in _NO_METRICS and draw(name)]


def _draw(views: Any, name: str, column: Any, axis_name: str, axis: Any, title: str) -> bool:
    """A view of a column over an axis, if there is a line to draw; of its own numbers where gaps would hide it."""
    known = np.isfinite(column[()])
    if known.sum() < 2:
        return False
    signal = f"{name}_metric" if name in (axis_name, "title") else name
    view: Any = write_view(views, name, signal, column, {axis_name: axis}, title)
    if not known.all():
        for link, whole in ((signal, column), (axis_name, axis)):
            del view[link]
            view[link] = whole[known]
            view[link].attrs.update(whole.attrs)
    return True


def _write_largest(views: h5py.Group, datasets: Mapping[tuple[str, ...], h5py.Dataset]) -> str | None:
    drawn = {path: dataset for path, dataset in datasets.items() if dataset.ndim and dataset.size and path}
    floats = {path: dataset for path, dataset in drawn.items() if dataset.dtype.kind == "f"} or drawn
    if not floats:
        return None
    path = max(floats, key=lambda path: int(np.prod(floats[path].shape)))
    write_view(views, "largest", "tensor", floats[path], {}, ".".join(path))
    return "largest"
