"""Conversion between values of a Gymnasium space and batched tensors.

Discrete and MultiDiscrete become int64, and MultiBinary becomes int8. A Box keeps its dtype, but float64 becomes
float32, and unsigned integers that torch does not support become the next wider signed type. Dict and Tuple become
dictionaries; the keys of a Tuple are "0", "1", ...

Shapes: N values, A one value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from rein.errors import EnvironmentContractError
from rein.spaces import CRITIC_OBSERVATION, children, map_space
from rein.types import Tree

_NARROWED = {"float64": "float32", "uint16": "int32", "uint32": "int64", "uint64": "int64"}
_LARGEST = np.iinfo(np.int64).max
_COUNTED = range(_LARGEST)  # row numbers 0, 1, ...
_OBSERVATION = "observation"
_ACTOR_GROUPS, _CRITIC_GROUP = ("policy", "actor"), "critic"  # of Isaac Lab and mjlab
_PLAYGROUND = {"state": _OBSERVATION, "privileged_state": CRITIC_OBSERVATION}
_FROM = {"f": "fiub", "i": "iub", "u": "ub", "b": "b"}  # dtype kind: kinds that may be cast to it


def layout(space: spaces.Space[Any]) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Return shape and dtype of one value of a Box, Discrete, MultiDiscrete or MultiBinary space.

    Raises TypeError for other spaces.
    """
    if isinstance(space, spaces.Discrete):
        return (), np.dtype(np.int64)
    if isinstance(space, spaces.MultiDiscrete):
        return space.nvec.shape, np.dtype(np.int64)
    if isinstance(space, spaces.Box | spaces.MultiBinary):
        dtype = np.dtype(space.dtype)
        if dtype.name == "uint64" and isinstance(space, spaces.Box) and (space.high > _LARGEST).any():
            raise TypeError(
                f"{space}: torch does not support uint64, and int64 is used instead; give a high of {_LARGEST} at most"
            )
        return tuple(space.shape), np.dtype(_NARROWED.get(dtype.name, dtype))
    advice = ""
    if isinstance(space, spaces.Text | spaces.OneOf):
        advice = "; gymnasium.wrappers.FlattenObservation turns such observations into a Box"
    if isinstance(space, spaces.Sequence | spaces.Graph):
        advice = "; pad such observations to a fixed size, with a function in gymnasium.wrappers.TransformObservation"
    raise TypeError(
        f"{space}: not a tensor; use Box, Discrete, MultiDiscrete, MultiBinary, or a Dict or Tuple of these{advice}"
    )


def tensor_dtype(space: spaces.Space[Any]) -> torch.dtype:
    """Return the tensor dtype of a Box, Discrete, MultiDiscrete or MultiBinary space."""
    return torch.from_numpy(np.empty(0, layout(space)[1])).dtype


def dtypes_of(space: spaces.Space[Any]) -> Any:
    """Return the dtype of the tensor of a space, or a dictionary of dtypes for a Dict or Tuple."""
    return map_space(tensor_dtype, space)


def gymnasium_space(space: Any) -> spaces.Space[Any]:
    """Return a space of gymnax or mjlab as a Gymnasium space. Gymnasium spaces are returned unchanged.

    Raises TypeError for a space of another kind.
    """
    if isinstance(space, spaces.Space):
        return space
    parts = getattr(space, "spaces", None)
    if isinstance(parts, Mapping):
        return spaces.Dict({key: gymnasium_space(part) for key, part in parts.items()})
    if isinstance(parts, tuple | list):
        return spaces.Tuple([gymnasium_space(part) for part in parts])
    if hasattr(space, "n"):
        return spaces.Discrete(int(space.n))
    if hasattr(space, "low") and hasattr(space, "high"):
        dtype = np.dtype(space.dtype)
        low, high = (np.broadcast_to(np.asarray(bound, dtype), space.shape) for bound in (space.low, space.high))
        return spaces.Box(low, high, dtype=dtype.type)
    raise TypeError(f"{space!r}: not a Box, Discrete, Dict or Tuple of Gymnasium, gymnax or mjlab")


class ObservationGroups:
    """Renames the observation groups of the actor and the critic.

    The groups `policy` and `actor` become the entry `observation`, and `critic` becomes `critic_observation`. In
    MuJoCo Playground, these groups are called `state` and `privileged_state`. Other entries keep their names. A
    dictionary with only one of the actor's groups becomes the observation itself.
    """

    def __init__(self, space: spaces.Space[Any]) -> None:
        self.space = space
        self._only: str | None = None  # the group that is the whole observation
        self._names: dict[str, str] = {}
        if not isinstance(space, spaces.Dict):
            return
        actor = next((name for name in _ACTOR_GROUPS if name in space.spaces), None)
        if actor is not None and len(space.spaces) == 1:
            self._only, self.space = actor, space[actor]
            return
        names = {} if actor is None else {actor: _OBSERVATION, _CRITIC_GROUP: CRITIC_OBSERVATION}
        if _PLAYGROUND.keys() <= space.spaces.keys():
            names = _PLAYGROUND
        if names:
            self._names = {name: names.get(name, name) for name in space.spaces}
            self.space = spaces.Dict({self._names[name]: part for name, part in space.spaces.items()})

    def __call__(self, observation: Tree) -> Tree:
        """Return the observation with renamed entries. Entries that are not in the space are left out."""
        if self._only is not None:
            return observation[self._only]
        if self._names:
            return {new: observation[name] for name, new in self._names.items()}
        return observation


def rounded_bounds(space: spaces.Space[Any]) -> list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]:
    """Return (rounded, exact) pairs of the bounds of a Box that its tensor dtype cannot represent exactly."""
    dtype = layout(space)[1]
    if not isinstance(space, spaces.Box) or dtype == space.dtype:
        return []
    with np.errstate(over="ignore"):  # bounds beyond float32 become infinite
        pairs = [(bound.astype(dtype), bound) for bound in (space.low, space.high)]
    return [(rounded, bound) for rounded, bound in pairs if (rounded != bound).any()]


def widened(
    tensor: Tensor, dtype: Any, rounded: Sequence[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]
) -> np.ndarray[Any, Any]:
    """Return a new array `(N, *A)` of `dtype`. Values equal to a rounded bound become the exact bound.

    Otherwise a rounded value may exceed the bound.
    """
    array = np.array(tensor.numpy(force=True), dtype)
    for near, bound in rounded:
        np.copyto(array, bound, where=array == near)
    return array


class Codec:
    """Converts values of a space to tensors and back. Error messages name the value `field`."""

    def __init__(self, field: str, space: spaces.Space[Any]) -> None:
        self._field = field
        self._space = space
        inner = children(space)
        self._inner = None
        if inner is None:
            self._shape, self._dtype = layout(space)
            of_space = np.dtype(space.dtype)
            self._narrow = of_space if of_space.kind in "iu" and of_space != self._dtype else None
            self._tensor_dtype = tensor_dtype(space)
            self._rounded = rounded_bounds(space)
        else:
            places = range(len(inner)) if isinstance(space, spaces.Tuple) else inner  # keys or indices of the parts
            self._inner = {key: Codec(f"{field}.{key}", child) for key, child in inner.items()}
            self._places = dict(zip(inner, places, strict=True))

    def stack(self, values: Sequence[Any], rows: Sequence[int] = _COUNTED) -> Tree:
        """Stack N values to new tensors (N, ...). `rows` are the row numbers in error messages.

        Raises EnvironmentContractError if a value does not fit the space.
        """
        if self._inner is None:
            array = column(self._field, values, self._dtype, self._shape, rows)
            if self._narrow is not None:
                cast(self._field, array, self._narrow, rows)  # raises for values that the space's dtype cannot hold
            return torch.from_numpy(array)
        try:
            parts = {key: [value[place] for value in values] for key, place in self._places.items()}
        except (KeyError, IndexError, TypeError) as error:
            raise EnvironmentContractError(self._misfit(values, rows)) from error
        return {key: inner.stack(parts[key], rows) for key, inner in self._inner.items()}

    def _misfit(self, values: Sequence[Any], rows: Sequence[int]) -> str:
        """Return an error message that names the first value that lacks a part of the Dict or Tuple."""
        wanted, kind = list(self._places.values()), tuple if isinstance(self._space, spaces.Tuple) else Mapping
        for row, value in zip(rows, values, strict=False):
            if not isinstance(value, kind):
                return f"{self._field}, row {row}: expected a value of {self._space}, got {type(value).__name__}"
            there = range(len(value)) if kind is tuple else value
            if missing := [str(place) for place in wanted if place not in there]:
                has = ", ".join(map(str, there)) or "none"
                return f"{self._field}, row {row}: lacks the key {', '.join(missing)} of its space; it has {has}"
        return f"{self._field}: expected values of {self._space}"

    def split(self, tree: Tree, rows: int) -> list[Any]:
        """Split tensors (rows, ...) into single values, which share no memory with the tensors.

        Raises EnvironmentContractError for a wrong shape.
        """
        if self._inner is not None:
            return self._joined([inner.split(tree[key], rows) for key, inner in self._inner.items()])
        if tree.shape != (rows, *self._shape):
            expected, got = (rows, *self._shape), tuple(tree.shape)
            raise EnvironmentContractError(f"{self._field}: expected a tensor of shape {expected}, got {got}")
        if tree.dtype is not self._tensor_dtype:
            tree = tree.to(self._tensor_dtype)
        if isinstance(self._space, spaces.Discrete):
            return tree.tolist()
        array = widened(tree, self._space.dtype, self._rounded)
        return [array[row, ...] for row in range(rows)]  # arrays, even of a single number

    def _joined(self, columns: list[list[Any]]) -> list[Any]:
        """Combine the values of the parts to values of the Dict or Tuple."""
        if isinstance(self._space, spaces.Tuple):
            return list(zip(*columns, strict=True))
        return [dict(zip(self._inner or (), values, strict=True)) for values in zip(*columns, strict=True)]


def column(
    field: str,
    values: Sequence[Any],
    dtype: np.dtype[Any],
    shape: tuple[int, ...] = (),
    rows: Sequence[int] = _COUNTED,
) -> np.ndarray[Any, np.dtype[Any]]:
    """Return N values as one new array `(N, *shape)` of `dtype`. Casts may lose precision only.

    Raises EnvironmentContractError with the field and the row number in `rows`.
    """
    if not values:
        return np.empty((0, *shape), dtype)
    try:
        array = np.array(values)
    except ValueError:  # the shapes differ
        array = np.array(None)
    if array.shape[1:] == shape:
        if array.dtype is dtype:
            return array
        if array.dtype.kind in _FROM[dtype.kind]:
            return cast(field, array, dtype, rows)
    for row, value in zip(rows, values, strict=False):
        try:
            got = np.asarray(value)
        except ValueError:
            got = np.array(None)
        if got.shape != shape or got.dtype.kind not in _FROM[dtype.kind]:
            what = f"{got.dtype} of shape {got.shape}" if got.shape else repr(value)
            raise EnvironmentContractError(f"{field}, row {row}: expected {dtype} of shape {shape}, got {what}")
    # the values have different types
    each = [cast(field, np.asarray(value)[None], dtype, [row]) for row, value in zip(rows, values, strict=False)]
    return np.concatenate(each)


def cast(
    field: str, array: np.ndarray[Any, Any], dtype: np.dtype[Any], rows: Sequence[int] = _COUNTED
) -> np.ndarray[Any, np.dtype[Any]]:
    """Return an array (N, ...) as a new array of `dtype`. Floats may lose precision, or overflow with NumPy's warning.

    Raises EnvironmentContractError with field, row and value for an integer out of the range of `dtype`.
    """
    fresh = array.astype(dtype)
    if dtype.kind == "f" or np.can_cast(array.dtype, dtype):
        return fresh
    beyond = fresh != array  # integers wrap around silently
    if not np.count_nonzero(beyond):
        return fresh
    place = tuple(np.argwhere(beyond)[0].tolist())
    raise EnvironmentContractError(
        f"{field}, row {rows[place[0]]}: expected {dtype}, got {array[place]}, which is out of range"
    )


class BatchCodec:
    """Converts the arrays of N values of a space to tensors and back. Error messages name the values `field`.

    `batched` is the space of all N values, which defines the dtype of the arrays.
    """

    def __init__(self, field: str, space: spaces.Space[Any], batched: Any, num_envs: int) -> None:
        self._field = field
        inner = children(space)
        self._inner = None
        if inner is None:
            shape, self._dtype = layout(space)
            self._shape = (num_envs, *shape)
            self._batched_dtype = batched.dtype
            self._rounded = rounded_bounds(space)
        else:
            places = list(range(len(inner))) if isinstance(space, spaces.Tuple) else list(inner)
            self._inner = {
                key: (place, BatchCodec(f"{field}.{key}", child, batched[place], num_envs))
                for place, (key, child) in zip(places, inner.items(), strict=True)
            }
            self._is_tuple = isinstance(space, spaces.Tuple)

    def tensors(self, value: Any) -> Tree:
        """Return new tensors (N, ...), because the source may reuse its arrays.

        Raises EnvironmentContractError for a wrong shape or dtype.
        """
        if self._inner is None:
            return torch.from_numpy(array(self._field, value, self._dtype, self._shape))
        try:
            return {key: inner.tensors(value[place]) for key, (place, inner) in self._inner.items()}
        except (KeyError, IndexError, TypeError) as error:
            expected = f"one array for each of {', '.join(self._inner)}"
            raise EnvironmentContractError(f"{self._field}: expected {expected}: {error!r}") from error

    def arrays(self, tree: Tree) -> Any:
        """Return new arrays (N, ...). Raises EnvironmentContractError for a wrong shape."""
        if self._inner is not None:
            values = {place: inner.arrays(tree[key]) for key, (place, inner) in self._inner.items()}
            return tuple(values.values()) if self._is_tuple else values
        if tree.shape != self._shape:
            expected, got = self._shape, tuple(tree.shape)
            raise EnvironmentContractError(f"{self._field}: expected a tensor of shape {expected}, got {got}")
        return widened(tree, self._batched_dtype, self._rounded)


def array(field: str, value: Any, dtype: np.dtype[Any], shape: tuple[int, ...]) -> np.ndarray[Any, np.dtype[Any]]:
    """Return `value` as a new array of the dtype and shape. A cast may lose precision only.

    Raises EnvironmentContractError if the shape differs or a cast is not possible.
    """
    got = np.asarray(value)
    if got.shape == shape:
        if got.dtype is dtype:
            return np.array(got)
        if np.can_cast(got.dtype, dtype, "same_kind"):
            return cast(field, got, dtype)
    what = f"{got.dtype} of shape {got.shape}" if got.shape else repr(value)
    raise EnvironmentContractError(f"{field}: expected {dtype} of shape {shape}, got {what}")
