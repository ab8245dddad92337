"""Trees of tensors and other leaves (nested mappings, NamedTuples, tuples and lists), and checks of devices."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

_NAMED = "__namedtuple__"  # marks a packed NamedTuple; its value is the name of the type
_FIELDS = "__fields__"
_TUPLE = "__tuple__"
_CODEC = "__codec__"  # marks a value that a codec has encoded; its value is the name of the codec
_ENCODED = "__encoded__"

# class, function that returns an object of it as a tree, and its inverse
Codec = tuple[type, Callable[[Any], Any], Callable[[Any], Any]]


def is_namedtuple(value: object) -> bool:
    """Return whether `value` is an instance of a NamedTuple."""
    return isinstance(value, tuple) and hasattr(value, "_fields")


def map_tree(function: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """Apply `function` to every leaf of `tree`, with the leaves of `others` at the same places, and keep the structure.

    A leaf is anything that is not a mapping, tuple or list. `None` is an empty place, not a leaf, and stays `None`.
    """
    if tree is None:
        return None
    if isinstance(tree, Tensor):
        return function(tree, *others)
    if isinstance(tree, Mapping):
        return {key: map_tree(function, value, *(o[key] for o in others)) for key, value in tree.items()}
    if isinstance(tree, tuple | list):
        parts = [map_tree(function, *values) for values in zip(tree, *others, strict=True)]
        if is_namedtuple(tree):
            return type(tree)(*parts)
        return type(tree)(parts)
    return function(tree, *others)


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield `(path, leaf)` for every leaf, in a fixed order. An example of a path: `transition.observation.camera`."""
    if tree is None:
        return
    if isinstance(tree, Mapping):
        items: Any = tree.items()
    elif is_namedtuple(tree):
        items = zip(tree._fields, tree, strict=True)
    elif isinstance(tree, tuple | list):
        items = enumerate(tree)
    else:
        yield path, tree
        return
    for key, value in items:
        yield from leaves(value, f"{path}.{key}" if path else str(key))


def compact(leaf: Any) -> Any:
    """Return a copy of a tensor that is a part of a larger memory, which `torch.save` would write as a whole.

    Other leaves are returned unchanged.
    """
    return leaf.clone() if isinstance(leaf, Tensor) and leaf.untyped_storage().nbytes() > leaf.nbytes else leaf


def by_name(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Return named values as a dictionary. Raises ValueError if two have the same name, as keys with dots can cause."""
    named: dict[str, Any] = {}
    for name, value in pairs:
        if name in named:
            raise ValueError(f"two tensors have the name {name!r}: rename a key that contains a dot")
        named[name] = value
    return named


def to_device(tree: Any, device: torch.device | str, *, non_blocking: bool = False) -> Any:
    """Return the tree with every tensor on `device`. Other leaves are unchanged."""
    return map_tree(lambda x: x.to(device, non_blocking=non_blocking) if isinstance(x, Tensor) else x, tree)


Read = tuple[Sequence[Tensor], Callable[..., None]]  # tensors, and a function of their copies on the host


def read_together(reads: Iterable[Read]) -> None:
    """Copy the tensors of all reads to the host, those of a device in one transfer, and call each function in order."""
    reads = list(reads)
    copies = iter(host_copies([x for tensors, _ in reads for x in tensors]))
    for tensors, receive in reads:
        receive(*[next(copies) for _ in tensors])


def host_copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copy tensors of one device to the host in one transfer. Tensors on the host are returned unchanged."""
    there = sorted((x for x in tensors if x.device.type != "cpu"), key=lambda x: -x.itemsize)  # so that all are aligned
    if not there:
        return list(tensors)
    bytes_of = [x.reshape(-1).view(torch.uint8) for x in there]
    parts = torch.cat(bytes_of).cpu().split([len(part) for part in bytes_of])
    copies = {id(x): part.view(x.dtype).view(x.shape) for x, part in zip(there, parts, strict=True)}
    return [copies.get(id(x), x) for x in tensors]


def pack(tree: Any, codecs: Mapping[str, Codec] | None = None) -> Any:
    """Rewrite NamedTuples and tuples as marked dictionaries and lists, which files can store without pickle.

    Objects of the classes in `codecs` become trees, marked with the name of their codec. Tensors and other leaves are
    unchanged. `unpack` is the inverse.
    """
    for name, (kind, encode, _) in (codecs or {}).items():
        if type(tree) is kind:
            return {_CODEC: name, _ENCODED: pack(encode(tree), codecs)}
    if is_namedtuple(tree):
        fields = {name: pack(value, codecs) for name, value in zip(tree._fields, tree, strict=True)}
        return {_NAMED: type(tree).__name__, _FIELDS: fields}
    if isinstance(tree, Mapping):
        return {key: pack(value, codecs) for key, value in tree.items()}
    if isinstance(tree, tuple):
        return {_TUPLE: [pack(value, codecs) for value in tree]}
    if isinstance(tree, list):
        return [pack(value, codecs) for value in tree]
    return tree


def is_packed(tree: Any) -> bool:
    """Return whether a tree is a NamedTuple packed by `pack`."""
    return isinstance(tree, Mapping) and _NAMED in tree


def unpack(tree: Any, types: Mapping[str, type] | None = None, codecs: Mapping[str, Codec] | None = None) -> Any:
    """Undo `pack`. A NamedTuple whose name is in `types` gets that type; any other gets a new type with its fields.

    Types are never imported by name from the data: a file could then choose the code that runs. Raises ValueError for
    the name of a codec that is not in `codecs`.
    """
    if isinstance(tree, Mapping):
        if _CODEC in tree:
            if tree[_CODEC] not in (codecs or {}):
                raise ValueError(f"the codec {tree[_CODEC]!r} is missing: build the loop with Loop(step, codecs=...)")
            return codecs[tree[_CODEC]][2](unpack(tree[_ENCODED], types, codecs))  # type: ignore[index]  # not None
        if _NAMED in tree:
            name, fields = str(tree[_NAMED]), tree[_FIELDS]
            kind = (types or {}).get(name)
            if kind is None or set(getattr(kind, "_fields", ())) != set(fields):
                kind = collections.namedtuple(name, list(fields))
            # by name, because a file may sort the fields
            return kind(**{field: unpack(value, types, codecs) for field, value in fields.items()})
        if _TUPLE in tree:
            return tuple(unpack(value, types, codecs) for value in tree[_TUPLE])
        return {key: unpack(value, types, codecs) for key, value in tree.items()}
    if isinstance(tree, list):
        return [unpack(value, types, codecs) for value in tree]
    return tree


def namedtuples(tree: Any) -> dict[str, type]:
    """Return the NamedTuple types in `tree` by name, as `unpack` needs them."""
    types: dict[str, type] = {}
    if is_namedtuple(tree):
        types[type(tree).__name__] = type(tree)
    children = tree.values() if isinstance(tree, Mapping) else tree if isinstance(tree, tuple | list) else ()
    for child in children:
        types |= namedtuples(child)
    return types


def tree_signature(tree: Any) -> dict[str, str]:
    """Return a description of every leaf by path: shape, dtype and device of tensors, the type of other leaves."""
    return {
        path: f"{tuple(leaf.shape)} {leaf.dtype} on {leaf.device}" if isinstance(leaf, Tensor) else type(leaf).__name__
        for path, leaf in leaves(tree)
    }


def signature_drift(before: Mapping[str, str], after: Mapping[str, str]) -> str:
    """Return the differences of two signatures, by path, as text."""
    paths = list(dict.fromkeys((*before, *after)))
    changed = [f"{p or 'it'} was {before.get(p, 'absent')} and is {after.get(p, 'absent')}" for p in paths]
    return "; ".join(text for p, text in zip(paths, changed, strict=True) if before.get(p) != after.get(p))


def plain_state(optimizer: Any) -> dict[str, Any]:
    """Return the optimizer's state with string keys and lists, which a checkpoint can store without pickle."""
    state = optimizer.state_dict()
    if not isinstance(optimizer, torch.optim.Optimizer):
        return state
    groups = [
        {name: list(value) if isinstance(value, tuple) else value for name, value in group.items()}
        for group in state["param_groups"]
    ]
    return {"state": {str(index): dict(entries) for index, entries in state["state"].items()}, "param_groups": groups}


def load_plain_state(optimizer: Any, state: Mapping[str, Any]) -> None:
    """Load the result of `plain_state`."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        optimizer.load_state_dict(state)
        return
    own_groups = optimizer.state_dict()["param_groups"]
    groups = [
        {name: tuple(value) if isinstance(own.get(name), tuple) else value for name, value in group.items()}
        for group, own in zip(state["param_groups"], own_groups, strict=True)
    ]
    # torch may keep the tensors without a copy
    entries = {int(index): map_tree(_copied, value) for index, value in state["state"].items()}
    optimizer.load_state_dict({"state": entries, "param_groups": groups})


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def checked_device(device: Any) -> torch.device:
    """Return `device` as a `torch.device`. Raises ValueError if torch has no such device on this machine."""
    try:
        checked = torch.device(device)
    except (RuntimeError, TypeError) as error:
        what = "is not the name of a torch device" if isinstance(device, str) else "is not a torch device"
        raise ValueError(f'device={device!r} {what}; use device="cpu" or device="cuda"') from error
    try:
        torch.empty(0, dtype=torch.float32, device=checked)
    except (RuntimeError, AssertionError, ImportError) as error:
        raise ValueError(f'device="{checked}": torch finds no such device on this machine; use device="cpu"') from error
    return checked
