"""NXdata groups: what makes H5Web, silx and NeXpy plot by themselves when a file is opened.

A view hard-links what it shows and its axes, so no data is there twice. Which attributes the viewers obey, and how,
was found out by rendering with each of them; `docs/format.md` says which are written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import h5py
import numpy as np

from rein.store.format.objects import add_dataset, add_group, add_text, encode_name, link, set_attributes

_OWN = ("step", "env", "row", "epoch", "title")  # names that a view uses itself


def interpretation(shape: Sequence[int]) -> str | None:
    """How to draw (rows, environments, ...): pictures as such, vectors as lines, one number each as a map."""
    if len(shape) >= 5 and shape[-1] == 3:
        return "rgb-image"
    if len(shape) >= 4:
        return "image"
    return "spectrum" if len(shape) == 3 or shape[1] == 1 else None


class Shown(NamedTuple):
    """The datasets of a file that views are made of."""

    fields: Mapping[str, Any]  # by name; those of nested observations in mappings of their own
    axes: h5py.Group  # of pictures, whose rows get an axis there
    step: h5py.Dataset
    env: h5py.Dataset
    last_step: h5py.Dataset  # of each episode
    episode_return: h5py.Dataset
    epoch: h5py.Dataset
    metrics: Mapping[str, h5py.Dataset]  # by name, which is not that of the dataset where it cannot be


def write_views(entry: h5py.Group, shown: Shown, title: str) -> str | None:
    """A view for each field, for the episodes' returns and for each metric; returns the name of the one to open with.

    The returns are it where there are some to compare: rewards that are always the same say nothing as a map.
    """
    views = add_group(entry, "views", "NXcollection")
    names = list(_write_field_views(views, shown.fields, shown, title, ()))
    if makes_a_line(shown.last_step):
        default = "episode_return" if "episode_return" not in views else _free(views, "return_of_episodes")
        # a point for each episode, which two axes as long as the signal make it; its colour is its return too
        axes = {"last_step": shown.last_step, "episode_return": shown.episode_return}
        returns, over = shown.episode_return, list(axes)
        write_view(views, default, "return", returns, axes, f"episode return, {title}", over=over)
    else:
        default = _field_to_open_with(names, shown.fields)
    if makes_a_line(shown.epoch):
        group = add_group(views, _free(views, "metrics"), "NXcollection")
        for name, column in shown.metrics.items():
            key = encode_name(name)
            write_view(group, key, f"{key}_metric" if key in _OWN else key, column, {"epoch": shown.epoch}, name)
    if default is not None:
        set_attributes(views, default=default)  # or clicking on the group shows the first by the alphabet
    return default


def makes_a_line(axis: h5py.Dataset | np.ndarray) -> bool:
    """Whether there are two points with something between them."""
    values = axis[()]
    return len(values) > 1 and bool((values != values[0]).any())


def write_view(
    views: h5py.Group,
    name: str,
    signal: str,
    shown: h5py.Dataset,
    axes: Mapping[str, h5py.Dataset],
    title: str,
    over: Sequence[str] | None = None,
    **attributes: Any,
) -> h5py.Group:
    """A view of `shown` over `axes`, one for each of its first dimensions, or as `over` says of all its dimensions."""
    over = [*axes, *"." * (shown.ndim - len(axes))] if over is None else over
    view = add_group(views, name, "NXdata", signal=signal, axes=over, **attributes)
    add_text(view, "title", title)
    for key, target in {signal: shown, **axes}.items():
        link(view, key, target)
    return view


def _field_to_open_with(names: Sequence[str], fields: Mapping[str, Any]) -> str | None:
    """The rewards; what was observed where all of them are equal."""
    rewards = fields["reward"][()] if "reward" in names else np.empty(0)
    known = rewards[np.isfinite(rewards)]
    if known.size and (known != known[0]).any():
        return "reward"
    return next((name for name in names if name.split("/")[0] == "observation"), next(iter(names), None))


def _free(group: h5py.Group, name: str) -> str:
    """A name that no field has taken."""
    return name if name not in group else _free(group, f"{name}_of_epochs")


def _write_field_views(
    views: h5py.Group, fields: Mapping[str, Any], shown: Shown, title: str, path: tuple[str, ...]
) -> Iterator[str]:
    for key, node in fields.items():
        where = (*path, key)
        if isinstance(node, Mapping):
            yield from _write_field_views(add_group(views, key, "NXcollection"), node, shown, title, where)
        elif node.size:  # an empty plot shows as an error
            signal = f"{key}_field" if key in _OWN else key
            axes, more = _axes_of(node, shown)
            write_view(views, key, signal, node, axes, f"{'.'.join(where)}, {title}", **more)
            yield "/".join(where)


def _axes_of(node: h5py.Dataset, shown: Shown) -> tuple[dict[str, h5py.Dataset], dict[str, Any]]:
    """What a field is drawn over, and what else its view says."""
    axes, how = {"step": shown.step, "env": shown.env}, interpretation(node.shape)
    if how == "spectrum":  # a line over time, with a slider for the others
        return axes, {"default_slice": [".", *"0" * (node.ndim - 1)]}
    dimension = node.ndim - (3 if how == "rgb-image" else 2)
    if how is None or node.shape[dimension] < 2:
        return axes, {}
    # rows of a picture are counted from its bottom, where viewers would draw the first one
    rest = "." * (node.ndim - 3)
    over = [*axes, *rest]
    over.insert(dimension, "row")
    return {**axes, "row": _row_axis(shown.axes, node.shape[dimension])}, {"over": over}


def _row_axis(axes: Any, height: int) -> h5py.Dataset:
    name = f"row_{height}"
    if name in axes:
        return axes[name]
    axis = add_dataset(axes, name, np.arange(height, dtype=np.int64)[::-1])
    set_attributes(axis, long_name="row from the bottom")
    return axis
