"""Encode a tree of state as an HDF5 file without pickle, and decode it without HDF5.

Content of a file::

    /entry/state/<path>      every tensor is a dataset; groups are the dictionaries and lists around it
    /entry/structure         JSON: the tree, in which a tensor is its dtype, shape, offset in the file and device
    /entry/about             JSON: description of the state

A trailer after the HDF5 part has the positions of the two JSON texts. Reading needs nothing else. It never calls HDF5's
parser, which a hostile file can crash or hang, and never executes code from a file.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import h5py
import numpy as np
import torch
from torch import Tensor

from rein.files import check_values, decode_json
from rein.ops.trees import map_tree
from rein.store.format.nexus import add_group, add_text, encode_name, write_plot
from rein.store.format.sealed import FORMAT, USER_BLOCK, compose

_NATIVE = ("bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64", "float32", "float64")
_AS_BITS = ("float16", "bfloat16", "complex32", "complex64", "complex128")  # viewers cannot show these types
_AS_BITS += ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu")
_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in (*_NATIVE, *_AS_BITS)}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# keys of dictionaries that represent other values
_TENSOR, _ARRAY, _FLOAT, _ROWS = "$tensor", "$array", "$float", "$rows"
_NONFINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}  # not allowed in strict JSON
_DEEPEST = 96  # levels of a state, so that `decode_json` accepts its JSON
_TRAILER = "#rein-state about {:018d} {:018d} structure {:018d} {:018d}\n"
_TRAILER_PATTERN = re.compile(rb"#rein-state about (\d{18}) (\d{18}) structure (\d{18}) (\d{18})\n")
TRAILER_LENGTH = len(_TRAILER.format(0, 0, 0, 0))

Texts = dict[str, tuple[int, int]]  # name -> offset in the file and length


class Held(NamedTuple):
    """Host copy of a tensor, and the device of the original."""

    tensor: Tensor
    device: str


class Shard:
    """Tensor in a row file: `held` until the file is written, then the `name` of the file."""

    def __init__(self, held: Held) -> None:
        self.held: Held | None = held
        self.name = ""
        dtype = str(held.tensor.dtype).removeprefix("torch.")
        self.described = {"dtype": dtype, "shape": list(held.tensor.shape), "device": held.device}

    @property
    def nbytes(self) -> int:
        """Bytes of memory in use."""
        held = self.held  # the writer's thread may set it to None
        return 0 if held is None else held.tensor.nbytes


def hold(leaf: Any) -> Any:
    """Copy a leaf of a state to the host."""
    if isinstance(leaf, Tensor):
        return Held(leaf.detach().to("cpu", copy=True), str(leaf.device))
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf


def snapshot(state: Any, hold: Callable[[Any], Any] = hold) -> Any:
    """Copy a tree to the host. The copy shares no memory with it, so training can continue while it is written."""
    return map_tree(hold, state)


def encode_state(state: Any, about: Mapping[str, Any]) -> memoryview:
    """Return the bytes of a file that holds `state`: dictionaries with string keys, lists, tensors, arrays and JSON.

    `about` must be JSON. Raises TypeError or ValueError with the path of a value that cannot be stored.
    """
    datasets: dict[tuple[str, ...], tuple[np.ndarray, dict[str, Any]]] = {}
    structure = _encode(state, (), datasets)
    texts: Texts = {}

    def build(file: h5py.File) -> None:
        file.attrs.update(NX_class="NXroot", creator="rein", rein_format=FORMAT, default="entry")
        entry = add_group(file, "entry", "NXentry")
        written = _write_datasets(add_group(entry, "state", "NXcollection"), datasets)
        for name, value in (("about", _json(about)), ("structure", structure)):
            texts[name] = _write_json(entry, name, value)
        write_plot(entry, state, written)

    def trailer() -> bytes:
        return _TRAILER.format(*texts["about"], *texts["structure"]).encode()

    return compose(build, sum(array.nbytes for array, _ in datasets.values()), trailer)


def decode_state(content: bytearray, rows: Callable[[str], Tensor] | None = None) -> tuple[Any, dict[str, Any]]:
    """Return the state and its description from all bytes of a file whose hash is correct.

    `rows(name)` must return the tensor of a shard. Tensors are placed on their original device if it exists, otherwise
    on the host. Raises ValueError for content that `encode_state` does not write.
    """
    about_at, structure_at = find_texts(bytes(content[-TRAILER_LENGTH:]))
    about = parse_json(content, about_at)
    if not isinstance(about, dict):
        raise ValueError("its description is not a dictionary")
    left = len(content)  # bytes that further tensors may take, so that all tensors fit into the file

    def take(kind: str, described: Mapping[str, Any]) -> Tensor:
        nonlocal left
        if kind == _ROWS:
            return _check_rows(described, rows)
        tensor = _decode_tensor(described, content)
        left -= tensor.nbytes
        if left < 0:
            raise ValueError("its tensors are larger than the file")
        return tensor

    try:
        return _decode(parse_json(content, structure_at), take), about
    except (RecursionError, TypeError, KeyError, RuntimeError, OverflowError) as error:
        raise ValueError(f"its structure is invalid: {error!r:.200}") from error


def find_texts(trailer: bytes) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return offset and length of `about` and of the structure. Raises ValueError if the trailer is invalid."""
    match = _TRAILER_PATTERN.fullmatch(trailer)
    if match is None:
        raise ValueError("it is not a checkpoint: it does not end with the trailer of one")
    a, b, c, d = map(int, match.groups())
    return (a, b), (c, d)


def parse_json(content: bytes | bytearray, at: tuple[int, int], first: int = 0) -> Any:
    """Parse the JSON at (offset, length) of a file. `content` are its bytes from `first` on. Raises ValueError."""
    offset, length = at[0] - first, at[1]
    if offset < 0 or offset + length > len(content):
        raise ValueError("its JSON lies outside the file")
    try:
        text = bytes(content[offset : offset + length])
        return decode_json(text, parse_constant=_refuse, object_hook=_number)
    except ValueError as error:
        raise ValueError(f"its JSON cannot be read: {error!s:.200}") from error


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def _number(described: dict[str, Any]) -> Any:
    """Return the number that a dictionary represents, or the dictionary if it represents none."""
    if described.keys() != {_FLOAT}:
        return described
    if described[_FLOAT] not in list(_NONFINITE):
        raise ValueError(f"{described[_FLOAT]!r:.80} is not a number")
    return _NONFINITE[described[_FLOAT]]


def _json(value: Any) -> Any:
    """Convert the description of a state to strict JSON."""
    if isinstance(value, Mapping):
        return {key: _json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json(item) for item in value]
    return {_FLOAT: str(float(value))} if isinstance(value, float) and not math.isfinite(value) else value


def _encode(value: Any, path: tuple[str, ...], datasets: dict[tuple[str, ...], Any]) -> Any:
    """Return the JSON that represents `value`. Its tensors are added to `datasets`."""
    if len(path) > _DEEPEST:
        raise ValueError(f"{_text(path):.80} is nested in more than {_DEEPEST} levels; flatten it")
    if isinstance(value, np.generic) and value.dtype.kind in "biuf" and value.dtype.itemsize <= 8:
        value = value.item()
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {_FLOAT: str(value)}
    if isinstance(value, Held):
        return _encode_tensor(value.tensor, value.device, path, datasets)
    if isinstance(value, Shard):
        return {_ROWS: {"file": value.name, **value.described}}
    if isinstance(value, Tensor):
        return _encode_tensor(value.detach().cpu(), str(value.device), path, datasets)
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in "biufc" or value.dtype.itemsize > 16 or value.dtype.kind + value.dtype.char == "fg":
            raise TypeError(f"{_text(path)} is an array of {value.dtype}; only numbers and booleans can be stored")
        native = np.array(value, value.dtype.newbyteorder("="), order="C")
        encoded = _encode_tensor(torch.from_numpy(native), "cpu", path, datasets)
        return {_ARRAY: encoded[_TENSOR]}
    if type(value) is list:
        return [_encode(item, (*path, str(index)), datasets) for index, item in enumerate(value)]
    if isinstance(value, Mapping):
        encoded = {}
        for key, item in value.items():
            if type(key) is not str:
                advice = "; rein.ops.trees.plain_state rewrites an optimizer's" if path[:1] == ("parts",) else ""
                raise TypeError(f"{_text(path)} has the key {key!r}; keys must be strings, such as str(key){advice}")
            encoded[f"${key}" if key.startswith("$") else key] = _encode(item, (*path, key), datasets)
        return encoded
    advice = "; rein.ops.trees.pack rewrites it" if isinstance(value, tuple) else ""
    raise TypeError(f"{_text(path)} is a {type(value).__name__}, which a state cannot hold{advice}")


def _encode_tensor(tensor: Tensor, device: str, path: tuple[str, ...], datasets: dict[tuple[str, ...], Any]) -> Any:
    if tensor.layout != torch.strided or tensor.dtype not in _NAMES:
        raise TypeError(f"{_text(path)} is a tensor of {tensor.dtype}, {tensor.layout}, which a state cannot hold")
    name = _NAMES[tensor.dtype]
    tensor = tensor.resolve_conj().resolve_neg()
    described: dict[str, Any] = {"dtype": name, "shape": list(tensor.shape), "device": device}
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if _NAMES[tensor.dtype] not in _NATIVE:
        tensor = tensor.contiguous().view(_BITS[tensor.element_size()])
    datasets[path] = tensor.contiguous().numpy(), described
    return {_TENSOR: described}


def _text(path: tuple[str, ...]) -> str:
    return ".".join(("state", *path))


def _write_datasets(group: h5py.Group, datasets: Mapping[tuple[str, ...], Any]) -> dict[tuple[str, ...], h5py.Dataset]:
    """Write all datasets raw and contiguous, and add the offset of each to its description."""
    groups: dict[tuple[str, ...], h5py.Group] = {(): group}
    written = {}
    for path, (array, described) in datasets.items():
        for depth in range(1, len(path)):
            if path[:depth] not in groups:
                groups[path[:depth]] = add_group(groups[path[: depth - 1]], _link(path[depth - 1]), "NXcollection")
        dataset = groups[path[:-1]].create_dataset(_link(path[-1]) if path else "tensor", data=array)
        described["offset"] = (dataset.id.get_offset() or 0) if array.nbytes else 0
        written[path] = dataset
    return written


def _link(name: str) -> str:
    return encode_name(name) or "%"  # HDF5 has no empty names, and `encode_name` never returns "%"


def _write_json(entry: h5py.Group, name: str, value: Any) -> tuple[int, int]:
    text = json.dumps(value, allow_nan=False)
    check_values(text)
    note = add_group(entry, name, "NXnote")  # viewers print the JSON
    add_text(note, "type", "application/json")
    add_text(note, "data", text)
    dataset: Any = note["data"]
    return dataset.id.get_offset(), len(text.encode())


def _decode(value: Any, take: Callable[[str, Mapping[str, Any]], Tensor]) -> Any:
    if isinstance(value, list):
        return [_decode(item, take) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        ((key, inner),) = value.items()
        if key in (_TENSOR, _ROWS):
            return take(key, inner).to(_device(inner["device"]))
        if key == _ARRAY:
            return take(key, inner).numpy()
    return {key[1:] if key.startswith("$") else key: _decode(item, take) for key, item in value.items()}


def _check_rows(described: Mapping[str, Any], rows: Callable[[str], Tensor] | None) -> Tensor:
    if rows is None:
        raise ValueError("it refers to another file, which is not allowed here")
    tensor = rows(str(described["file"]))
    if [*tensor.shape] != described["shape"] or tensor.dtype != _DTYPES[described["dtype"]]:
        raise ValueError(f"the rows in {described['file']} have another shape or dtype than described")
    return tensor


def _decode_tensor(described: Mapping[str, Any], content: bytearray) -> Tensor:
    dtype, shape, offset = _DTYPES[described["dtype"]], described["shape"], described["offset"]
    if type(shape) is not list or len(shape) > 64 or any(type(n) is not int or n < 0 for n in (offset, *shape)):
        raise ValueError("a tensor has an invalid shape or offset")
    length = math.prod(shape) * dtype.itemsize
    if length == 0:
        return torch.empty(shape, dtype=dtype, device="cpu")
    if offset < USER_BLOCK or offset + length > len(content):
        raise ValueError("a tensor lies outside the file")
    raw = torch.frombuffer(content, dtype=torch.uint8, count=length, offset=offset).clone()  # an aligned copy
    return (raw != 0 if dtype is torch.bool else raw.view(dtype)).reshape(shape)


def _device(name: str) -> torch.device:
    """Return the named device if it exists, otherwise the CPU."""
    if not isinstance(name, str):  # with CUDA, torch accepts integers
        raise ValueError(f"a tensor has the invalid device {name!r:.80}")
    device = torch.device(name)
    accelerator = torch.accelerator.current_accelerator()
    there = accelerator is not None and device.type == accelerator.type
    return device if there and (device.index or 0) < torch.accelerator.device_count() else torch.device("cpu")
