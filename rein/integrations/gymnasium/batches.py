"""Values of a Gymnasium space as vector environments have them, N in one array, and as tensors.

Shapes: N environments.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gymnasium import spaces

from rein.errors import EnvironmentContractError
from rein.networks.flatten import children
from rein.rollout.spaces import cast, layout, rounded_bounds, widened
from rein.types import Tree


class BatchCodec:
    """Turns the arrays of N values of a space into tensors and back; `field` is what its errors call them.

    `batched` is the space of all N at once, which says the dtype of the arrays that go back.
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
        """Fresh tensors (N, ...), for the source may write to its arrays again; EnvironmentContractError by shape."""
        if self._inner is None:
            return torch.from_numpy(array(self._field, value, self._dtype, self._shape))
        try:
            return {key: inner.tensors(value[place]) for key, (place, inner) in self._inner.items()}
        except (KeyError, IndexError, TypeError) as error:
            expected = f"one array for each of {', '.join(self._inner)}"
            raise EnvironmentContractError(f"{self._field}: expected {expected}: {error!r}") from error

    def arrays(self, tree: Tree) -> Any:
        """Arrays of their own; EnvironmentContractError by shape."""
        if self._inner is not None:
            values = {place: inner.arrays(tree[key]) for key, (place, inner) in self._inner.items()}
            return tuple(values.values()) if self._is_tuple else values
        if tree.shape != self._shape:
            expected, got = self._shape, tuple(tree.shape)
            raise EnvironmentContractError(f"{self._field}: expected a tensor of shape {expected}, got {got}")
        return widened(tree, self._batched_dtype, self._rounded)


def array(field: str, value: Any, dtype: np.dtype[Any], shape: tuple[int, ...]) -> np.ndarray[Any, np.dtype[Any]]:
    """A fresh array of that dtype and shape, cast where that loses no more than precision.

    Raises EnvironmentContractError.
    """
    got = np.asarray(value)
    if got.shape == shape:
        if got.dtype is dtype:
            return np.array(got)
        if np.can_cast(got.dtype, dtype, "same_kind"):
            return cast(field, got, dtype)
    what = f"{got.dtype} of shape {got.shape}" if got.shape else repr(value)
    raise EnvironmentContractError(f"{field}: expected {dtype} of shape {shape}, got {what}")
