"""NXdata groups: what makes H5Web, silx and NeXpy plot by themselves when a file is opened.

A view hard-links what it shows and its axes, so no data is there twice. Which attributes the viewers obey, and how,
was found out by rendering with each of them; `docs/format.md` says which are written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import h5py
import numpy as np

_OWN = ("step", "env", "row", "epoch", "title")  # names that a view uses itself


def add_group(parent: h5py.Group, name: str, nexus_class: str) -> h5py.Group:
    """A new group with its NeXus class, without which viewers that know NeXus pass it over."""
    group = parent.create_group(name)
    group.attrs["NX_class"] = nexus_class
    return group


def add_text(group: h5py.Group, name: str, text: str) -> None:
    """A string of fixed length, since PyTables cannot read others."""
    data = text.encode()
    group.create_dataset(name, data=data, dtype=h5py.string_dtype(length=len(data)))


def interpretation(shape: Sequence[int]) -> str | None:
    """How to draw (rows, environments, ...): pictures as such, vectors as lines, one number each as a map."""
    if len(shape) >= 5 and shape[-1] == 3:
        return "rgb-image"
    if len(shape) >= 4:
        return "image"
    return "spectrum" if len(shape) == 3 or shape[1] == 1 else None


def write_views(entry: Any, title: str) -> str | None:
    """A view for each field, for the episodes' returns and for each metric; returns the name of the one to open with.

    The returns are it where there are some to compare: rewards that are always the same say nothing as a map.
    """
    views, axes = add_group(entry, "views", "NXcollection"), entry["axes"]
    names = list(_write_field_views(views, entry["trajectory"], axes, title, ()))
    if makes_a_line(entry["episodes/last_step"]):
        default = "episode_return" if "episode_return" not in views else _free(views, "return_of_episodes")
        _write_return_view(views, default, entry["episodes"], title)
    else:
        default = _field_to_open_with(names, entry["trajectory"])
    _write_metric_views(views, entry["epochs"])
    if default is not None:
        views.attrs["default"] = default  # or clicking on the group shows the first by the alphabet
    return default


def makes_a_line(axis: h5py.Dataset) -> bool:
    """Whether there are two points with something between them."""
    values = axis[()]
    return len(values) > 1 and bool((values != values[0]).any())


def _field_to_open_with(names: Sequence[str], fields: Any) -> str | None:
    """The rewards; what was observed where all of them are equal."""
    rewards = fields["reward"][()] if "reward" in names else np.empty(0)
    known = rewards[np.isfinite(rewards)]
    if known.size and (known != known[0]).any():
        return "reward"
    return next((name for name in names if name.split("/")[0] == "observation"), next(iter(names), None))


def _write_return_view(views: Any, name: str, episodes: Any, title: str) -> None:
    """A point for each episode, which two axes as long as the signal make it; its colour is its return too."""
    last_step, returns = episodes["last_step"], episodes["return"]
    view = write_view(views, name, "return", returns, {"last_step": last_step}, f"episode return, {title}")
    view["episode_return"] = returns
    view.attrs["axes"] = ["last_step", "episode_return"]


def _write_metric_views(views: Any, epochs: Any) -> None:
    if not makes_a_line(epochs["number"]):
        return
    group = add_group(views, _free(views, "metrics"), "NXcollection")
    for key, column in epochs["metrics"].items():
        name = column.attrs["long_name"]
        write_view(group, key, f"{key}_metric" if key in _OWN else key, column, {"epoch": epochs["number"]}, name)


def _free(group: h5py.Group, name: str) -> str:
    """A name that no field has taken."""
    return name if name not in group else _free(group, f"{name}_of_epochs")


def _write_field_views(views: Any, fields: Any, axes: Any, title: str, path: tuple[str, ...]) -> Iterator[str]:
    for key, node in fields.items():
        where = (*path, key)
        if isinstance(node, h5py.Group):
            yield from _write_field_views(add_group(views, key, "NXcollection"), node, axes, title, where)
        elif node.size:  # an empty plot shows as an error
            signal = f"{key}_field" if key in _OWN else key
            axis = {"step": axes["step"], "env": axes["env"]}
            view = write_view(views, key, signal, node, axis, f"{'.'.join(where)}, {title}")
            how = node.attrs.get("interpretation")
            if how == "spectrum":  # a line over time, with a slider for the others
                view.attrs["default_slice"] = [".", *"0" * (node.ndim - 1)]
            elif how is not None:
                _turn_upright(view, axes, node.shape, node.ndim - (3 if how == "rgb-image" else 2))
            yield "/".join(where)


def _turn_upright(view: Any, axes: Any, shape: Sequence[int], dimension: int) -> None:
    """Count the rows of a picture from its bottom, where viewers would draw the first one."""
    height = shape[dimension]
    name = f"row_{height}"
    if height < 2:
        return
    if name not in axes:
        axes[name] = np.arange(height, dtype=np.int64)[::-1]
        axes[name].attrs["long_name"] = "row from the bottom"
    view["row"] = axes[name]
    names = list(view.attrs["axes"])
    view.attrs["axes"] = [*names[:dimension], "row", *names[dimension + 1 :]]


def write_view(views: Any, name: str, signal: str, shown: Any, axes: Mapping[str, Any], title: str) -> h5py.Group:
    """A view of `shown` over `axes`, one for each of its first dimensions."""
    view = add_group(views, name, "NXdata")
    view.attrs["signal"] = signal
    view.attrs["axes"] = [*axes, *"." * (shown.ndim - len(axes))]
    add_text(view, "title", title)
    for link, target in {signal: shown, **axes}.items():
        view[link] = target  # a hard link
    return view
