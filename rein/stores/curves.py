"""What a file of state shows when a viewer opens it: the learning curve so far, or else its largest tensor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import h5py
import numpy as np

from rein.stores.layout import encode_name
from rein.stores.views import add_group, makes_a_line, write_view

_FIRST = ("evaluation_return", "episode_return")  # the curves to open with, where they are there


def write_plot(entry: h5py.Group, state: Any, datasets: Mapping[tuple[str, ...], h5py.Dataset]) -> None:
    """Views of every metric of the state's `history` over epochs, else of the largest tensor of numbers."""
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
        if np.isfinite(values).sum() > 1:  # else there is no line to draw
            signal = f"{link}_metric" if link in ("epoch", "title") else link
            write_view(views, link, signal, metrics[link], {"epoch": group["epoch"]}, f"{name}, until this checkpoint")
            shown.append(link)
    return next((name for name in (*_FIRST, *shown) if name in shown), None)


def _write_largest(views: h5py.Group, datasets: Mapping[tuple[str, ...], h5py.Dataset]) -> str | None:
    drawn = {path: dataset for path, dataset in datasets.items() if dataset.ndim and dataset.size and path}
    floats = {path: dataset for path, dataset in drawn.items() if dataset.dtype.kind == "f"} or drawn
    if not floats:
        return None
    path = max(floats, key=lambda path: int(np.prod(floats[path].shape)))
    write_view(views, "largest", "tensor", floats[path], {}, ".".join(path))
    return "largest"
