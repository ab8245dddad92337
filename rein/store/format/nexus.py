"""Objects of HDF5 files with NeXus classes, and plots for HDF5 viewers.

The plots are NXdata groups that H5Web, silx and NeXpy draw when a file is opened. A view hard-links its data and axes,
so no data is stored twice. `docs/reference/file_format.md` lists the attributes, which were chosen by rendering files
with each viewer.
"""

from __future__ import annotations

import functools
import itertools
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

import h5py
import numpy as np
from h5py import h5a, h5d, h5p, h5s, h5t  # type: ignore[attr-defined]  # no stubs

from rein.loop.state import CLOCKS
from rein.store.format.sealed import FORMAT

_LEVEL = 1  # of gzip
_TEXT = h5py.string_dtype()
_READABLE = " !#$&'()*+,;=:@[]{}<>|^"  # characters that names of metrics and clocks keep
_RESERVED = ("step", "env", "row", "epoch", "title")  # names of a view's axes and title
_FIRST = ("evaluation_return", "episode_return")  # preferred curves to open with
_NO_METRICS = ("epoch", "status", *CLOCKS)


def add_group(parent: h5py.Group, name: str, nexus_class: str, **attributes: Any) -> h5py.Group:
    """Create a group with its NeXus class. Viewers that know NeXus ignore groups without one."""
    group = parent.create_group(name)
    set_attributes(group, NX_class=nexus_class, **attributes)
    return group


def add_dataset(group: h5py.Group, name: str, array: np.ndarray, chunks: tuple[int, ...] | None = None) -> h5py.Dataset:
    """Create and write a dataset: contiguous, or in chunks of shape `chunks` with shuffle and gzip.

    Every chunk is compressed here. HDF5's filter would store chunks uncompressed that compression does not shrink.
    """
    if chunks is None:
        return group.create_dataset(name, data=array, track_times=False)  # equal data gives equal bytes
    filters: dict[str, Any] = dict(chunks=chunks, shuffle=True, compression="gzip", compression_opts=_LEVEL)
    dataset = group.create_dataset(name, array.shape, array.dtype, track_times=False, **filters)
    for first in itertools.product(*map(range, (0,) * array.ndim, array.shape, chunks)):
        part = array[tuple(slice(a, a + size) for a, size in zip(first, chunks, strict=True))]
        if part.shape != chunks:  # HDF5 pads the last chunks
            part = np.pad(part, [(0, whole - size) for whole, size in zip(chunks, part.shape, strict=True)])
        dataset.id.write_direct_chunk(first, _compress(part))
    return dataset


def _compress(chunk: np.ndarray) -> bytes:
    """Return a chunk in the encoding of HDF5's filters shuffle and gzip."""
    bytes_VW = np.ascontiguousarray(chunk).reshape(-1, 1).view(np.uint8)
    return zlib.compress(np.ascontiguousarray(bytes_VW.T).data, _LEVEL)


# A file has hundreds of attributes and texts. h5py's high-level API takes 1.3 times as long to make a file.


def add_text(group: h5py.Group, name: str, text: str) -> None:
    """Add a string dataset of fixed length, because PyTables cannot read others."""
    data = text.encode()
    kind = h5t.py_create(h5py.string_dtype(length=len(data)), logical=True)
    created = h5d.create(group.id, name.encode(), kind, _space(()), _without_times())
    created.write(h5s.ALL, h5s.ALL, np.array(data), mtype=kind)


def set_attributes(node: h5py.Group | h5py.Dataset, **attributes: str | Sequence[str] | int) -> None:
    """Create attributes: a string, a list of strings or an integer."""
    for name, value in attributes.items():
        array = np.array(value, None if isinstance(value, int) else _TEXT)
        attribute = h5a.create(node.id, name.encode(), _type(array.dtype), _space(array.shape))
        attribute.write(array)


@functools.lru_cache(8)
def _type(dtype: np.dtype) -> h5t.TypeID:
    return h5t.py_create(_TEXT if dtype.kind == "O" else dtype, logical=True)


@functools.lru_cache(64)
def _space(shape: tuple[int, ...]) -> h5s.SpaceID:
    return h5s.create_simple(shape) if shape else h5s.create(h5s.SCALAR)


@functools.cache
def _without_times() -> Any:
    properties = h5p.create(h5p.DATASET_CREATE)
    properties.set_obj_track_times(False)
    return properties


def encode_name(name: str) -> str:
    """Encode a metric's name as the name of a dataset. "/", which HDF5 reserves, becomes %2F."""
    return quote(name, safe=_READABLE) if name.strip(".") else name.replace(".", "%2E")


def decode_name(name: str) -> str:
    """Invert `encode_name`."""
    return unquote(name)


def interpretation(shape: Sequence[int]) -> str | None:
    """Return how to draw a field (R, N, ...): images as images, vectors as lines, scalars as a heat map (None)."""
    if len(shape) >= 5 and shape[-1] == 3:
        return "rgb-image"
    if len(shape) >= 4:
        return "image"
    return "spectrum" if len(shape) == 3 or shape[1] == 1 else None


class Shown(NamedTuple):
    """Datasets of a file that views show."""

    fields: Mapping[str, Any]  # by name; nested observations are nested mappings
    axes: h5py.Group  # group for the row axes of images
    step: h5py.Dataset
    env: h5py.Dataset
    last_step: h5py.Dataset  # of each episode
    episode_return: h5py.Dataset
    epoch: h5py.Dataset
    metrics: Mapping[str, h5py.Dataset]  # by name; the names of the datasets are encoded


def write_views(entry: h5py.Group, shown: Shown, title: str) -> str | None:
    """Write a view for each field, for the episode returns and for each metric. Returns the name of the default view.

    The default is the episode returns if there are several: a heat map of constant rewards is not informative.
    """
    views = add_group(entry, "views", "NXcollection")
    names = list(_write_field_views(views, shown.fields, shown, title, ()))
    if makes_a_line(shown.last_step):
        default = "episode_return" if "episode_return" not in views else _free(views, "return_of_episodes")
        # two axes as long as the signal draw a point per episode, colored by its return
        axes = {"last_step": shown.last_step, "episode_return": shown.episode_return}
        returns, over = shown.episode_return, list(axes)
        write_view(views, default, "return", returns, axes, f"episode return, {title}", over=over)
    else:
        default = _field_to_open_with(names, shown.fields)
    if makes_a_line(shown.epoch):
        group = add_group(views, _free(views, "metrics"), "NXcollection")
        for name, column in shown.metrics.items():
            key = encode_name(name)
            write_view(group, key, f"{key}_metric" if key in _RESERVED else key, column, {"epoch": shown.epoch}, name)
    if default is not None:
        set_attributes(views, default=default)  # otherwise viewers show the first view by name
    return default


def makes_a_line(axis: h5py.Dataset | np.ndarray) -> bool:
    """Return whether an axis has at least two different values."""
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
    """Create a view that plots `shown` over `axes`, one for each of its first dimensions.

    `over` overrides the names of the axes, one for each dimension; "." is a dimension without an axis.
    """
    over = [*axes, *"." * (shown.ndim - len(axes))] if over is None else over
    view = add_group(views, name, "NXdata", signal=signal, axes=over, **attributes)
    add_text(view, "title", title)
    for key, target in {signal: shown, **axes}.items():
        view[key] = target  # a hard link
    return view


def _field_to_open_with(names: Sequence[str], fields: Mapping[str, Any]) -> str | None:
    """Return the view of the rewards, or of an observation if all rewards are equal."""
    rewards = fields["reward"][()] if "reward" in names else np.empty(0)
    finite = rewards[np.isfinite(rewards)]
    if finite.size and (finite != finite[0]).any():
        return "reward"
    return next((name for name in names if name.split("/")[0] == "observation"), next(iter(names), None))


def _free(group: h5py.Group, name: str) -> str:
    """Return a name that is not used in the group."""
    return name if name not in group else _free(group, f"{name}_of_epochs")


def _write_field_views(
    views: h5py.Group, fields: Mapping[str, Any], shown: Shown, title: str, path: tuple[str, ...]
) -> Iterator[str]:
    for key, node in fields.items():
        where = (*path, key)
        if isinstance(node, Mapping):
            yield from _write_field_views(add_group(views, key, "NXcollection"), node, shown, title, where)
        elif node.size:  # an empty plot shows as an error
            signal = f"{key}_field" if key in _RESERVED else key
            axes, more = _axes_of(node, shown)
            write_view(views, key, signal, node, axes, f"{'.'.join(where)}, {title}", **more)
            yield "/".join(where)


def _axes_of(node: h5py.Dataset, shown: Shown) -> tuple[dict[str, h5py.Dataset], dict[str, Any]]:
    """Return the axes of a field's view, and its further attributes."""
    axes, how = {"step": shown.step, "env": shown.env}, interpretation(node.shape)
    if how == "spectrum":  # a line over time, with sliders for the other dimensions
        return axes, {"default_slice": [".", *"0" * (node.ndim - 1)]}
    dimension = node.ndim - (3 if how == "rgb-image" else 2)
    if how is None or node.shape[dimension] < 2:
        return axes, {}
    # rows of an image are counted from the bottom, because viewers draw the first row there
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


class _Column(NamedTuple):
    """Column of a table and its dataset."""

    dataset: h5py.Dataset
    values: np.ndarray
    title: str


def write_learning_curves(
    file: h5py.File, epochs: Mapping[str, np.ndarray], evaluations: Mapping[str, np.ndarray]
) -> None:
    """Write the columns of `metrics.csv` and `evaluations.csv` to `file`. It opens with the return over env steps."""
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
    """Write views of every metric in the state's `history` over epochs, or of the largest tensor without a history.

    Weights are marked to be drawn as heat maps.
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
    """Write a dataset for each column. Returns them by the column's name."""
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
    """Write a view of each metric over env steps, or over epochs if no environment was stepped."""
    axes = ("env_steps", "epoch")
    axis = next((name for name in axes if name in columns and makes_a_line(columns[name].values)), None)
    if axis is None:
        return []

    def draw(name: str) -> bool:
        return _draw(views, encode_name(name), columns[name], axis, columns[axis], f"{name} over {axis}")

    return [encode_name(name) for name in columns if name not in _NO_METRICS and draw(name)]


def _draw(views: h5py.Group, name: str, column: _Column, axis_name: str, axis: _Column, title: str) -> bool:
    """Write a view of a column over an axis if it has two finite values. Missing values are left out of a copy."""
    finite = np.isfinite(column.values)
    if finite.sum() < 2:
        return False
    signal = f"{name}_metric" if name in (axis_name, "title") else name
    if finite.all():
        write_view(views, name, signal, column.dataset, {axis_name: axis.dataset}, title)
        return True
    view = add_group(views, name, "NXdata", signal=signal, axes=[axis_name])
    add_text(view, "title", title)
    for key, whole in ((signal, column), (axis_name, axis)):
        set_attributes(add_dataset(view, key, whole.values[finite]), long_name=whole.title)
    return True


def _write_largest(views: h5py.Group, datasets: Mapping[tuple[str, ...], h5py.Dataset]) -> str | None:
    drawn = {path: dataset for path, dataset in datasets.items() if dataset.ndim and dataset.size and path}
    floats = {path: dataset for path, dataset in drawn.items() if dataset.dtype.kind == "f"} or drawn
    if not floats:
        return None
    path = max(floats, key=lambda path: int(np.prod(floats[path].shape)))
    write_view(views, "largest", "tensor", floats[path], {}, ".".join(path))
    return "largest"
