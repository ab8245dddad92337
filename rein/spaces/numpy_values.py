"""Values of a Gymnasium space in the format of the environment: one value, or a batch of values, as NumPy arrays.

A batch of a Dict or Tuple is a dictionary or a tuple of batches, as in Gymnasium's vector environments.

Shapes: N values, A one value.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from gymnasium import spaces

from rein.errors import EnvironmentContractError
from rein.spaces import children
from rein.spaces.conversion import cast, layout, rounded_bounds, widened
from rein.types import Tree

_KINDS = {"f": "fiub", "i": "iub", "u": "iub", "b": "b"}  # dtype kind: kinds of arrays that are accepted


class Values:
    """Converts one value, or a batch of values, to tensors and back. Error messages name the value `name`."""

    def __init__(self, name: str, space: spaces.Space[Any]) -> None:
        self._name = name
        self._is_tuple = isinstance(space, spaces.Tuple)
        inner = children(space)
        self._parts: list[tuple[str, Any, Values]] | None = None  # key of the tensor, place in the value
        if inner is not None:
            places = range(len(inner)) if self._is_tuple else inner
            pairs = zip(inner.items(), places, strict=True)
            self._parts = [(key, place, Values(f"{name}[{place!r}]", part)) for (key, part), place in pairs]
            return
        self._shape, self._dtype = layout(space)
        self._array_dtype = np.dtype(space.dtype)
        self._rounded = rounded_bounds(space)
        self._single = isinstance(space, spaces.Discrete)
        counted = isinstance(space, spaces.Discrete | spaces.MultiDiscrete)
        size: Any = space.n if self._single else getattr(space, "nvec", 0)  # type: ignore[attr-defined]  # Discrete
        self._range = (space.start, space.start + size) if counted else None  # type: ignore[attr-defined]  # counted

    def read(self, value: Any) -> tuple[Tree, bool]:
        """Return new tensors (N, ...) of a value, and whether it is one value: N is then 1.

        Raises ValueError, with the expected and the received shape, if it is neither one value nor a batch.
        """
        if self._parts is None:
            return self._read_array(value)
        read = {key: part.read(self._part(value, place)) for key, place, part in self._parts}
        (first, (_, is_one)), *others = read.items()
        counts = {key: "one value" if one else f"{_rows(tree)} values" for key, (tree, one) in read.items()}
        if different := [key for key, _ in others if counts[key] != counts[first]]:
            raise ValueError(
                f"{self._name}: expected all entries of one value or of the same number of values, got {counts[first]} "
                f"of {first!r} and {counts[different[0]]} of {different[0]!r}"
            )
        return {key: tree for key, (tree, _) in read.items()}, is_one

    def write(self, tree: Tree, is_one: bool) -> Any:
        """Return new arrays (N, ...) of tensors in the structure of the space, or the value of the only row."""
        if self._parts is not None:
            values = [(place, part.write(tree[key], is_one)) for key, place, part in self._parts]
            return tuple(value for _, value in values) if self._is_tuple else dict(values)
        if is_one and self._single:
            return int(tree.item())
        array = widened(tree, self._array_dtype, self._rounded)
        return array[0, ...] if is_one else array  # an array, even of a single number

    def _part(self, value: Any, place: Any) -> Any:
        kind = tuple | list if self._is_tuple else Mapping
        if isinstance(value, kind) and (place in value if isinstance(value, Mapping) else place < len(value)):
            return value[place]
        names = [place for _, place, _ in self._parts or ()]
        expected = f"a tuple of {len(names)} entries" if self._is_tuple else f"a dictionary with the keys {names}"
        got = f"the keys {list(value)}" if isinstance(value, Mapping) else f"{type(value).__name__}"
        got = f"{len(value)} entries" if self._is_tuple and isinstance(value, kind) else got
        raise ValueError(f"{self._name}: expected {expected}, got {got}")

    def _read_array(self, value: Any) -> tuple[Tree, bool]:
        try:
            array = np.array(value, order="C")
        except ValueError:  # lists of different lengths
            array = np.array(None)
        shape = array.shape
        is_one = shape == self._shape
        if not is_one and (len(shape) != len(self._shape) + 1 or shape[1:] != self._shape):
            batch = f"({', '.join(['N', *map(str, self._shape)])}{'' if self._shape else ','})"
            got = shape if array.dtype.kind in "fiub" else repr(value)
            raise ValueError(
                f"{self._name}: expected the shape {self._shape} of one value, or {batch} of N values, got {got!s:.200}"
            )
        if array.dtype != self._dtype:
            if array.dtype.kind not in _KINDS[self._dtype.kind]:
                raise ValueError(f"{self._name}: expected {self._dtype}, got {array.dtype}")
            try:
                array = cast(self._name, array, self._dtype)
            except EnvironmentContractError as error:
                raise ValueError(str(error)) from error
        if self._range is not None and bool(((array < self._range[0]) | (array >= self._range[1])).any()):
            low, high = (bound.tolist() if hasattr(bound, "tolist") else bound for bound in self._range)
            raise ValueError(f"{self._name}: expected integers from {low} to below {high}, got {array.tolist()!r:.200}")
        tensor = torch.from_numpy(array)
        return (tensor.unsqueeze(0) if is_one else tensor), is_one


def _rows(tree: Tree) -> int:
    while isinstance(tree, dict):
        tree = next(iter(tree.values()))
    return len(tree)
