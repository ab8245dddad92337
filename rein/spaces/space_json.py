"""Convert Gymnasium spaces to JSON and back. Checkpoints store the spaces of their agent."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium import spaces

Space = spaces.Space[Any]

# Limits of a space that is read from a file
_LARGEST = 1 << 24  # entries of all its parts
_PARTS = 10_000
_LISTED = 1 << 12  # largest number of bounds that are written as a list
_DEEPEST = 8  # levels of nested spaces


def describe_build(part: Any) -> dict[str, Any] | None:
    """Return the full name of a part's class and its spaces.

    Returns None if the part has no spaces, or a space that `space_as_json` does not support.
    """
    observation, action = getattr(part, "observation_space", None), getattr(part, "action_space", None)
    if not (isinstance(observation, spaces.Space) and isinstance(action, spaces.Space)):
        return None
    data = {"observation_space": space_as_json(observation), "action_space": space_as_json(action)}
    named = {"class": f"{type(part).__module__}.{type(part).__qualname__}"}
    return None if None in data.values() else {**named, **data}


def space_as_json(space: Space, depth: int = 0) -> dict[str, Any] | None:
    """Describe a space as JSON for `space_from_json`. Returns None for a space that `space_from_json` refuses."""
    kind = type(space)  # subclasses are not supported
    name = {"space": kind.__name__}
    if isinstance(space, spaces.Discrete) and kind is spaces.Discrete:
        return {**name, "n": int(space.n), "start": int(space.start), "dtype": str(space.dtype)}
    if isinstance(space, spaces.MultiDiscrete) and kind is spaces.MultiDiscrete:
        return {**name, "nvec": space.nvec.tolist(), "start": space.start.tolist(), "dtype": str(space.dtype)}
    if isinstance(space, spaces.MultiBinary) and kind is spaces.MultiBinary:
        n = space.n if isinstance(space.n, int) else list(space.n)
        return {**name, "n": n} if math.prod(space.shape) <= _LARGEST else None
    if isinstance(space, spaces.Box) and kind is spaces.Box:
        low, high = _bound(space.low), _bound(space.high)
        data = {"low": low, "high": high, "shape": list(space.shape), "dtype": str(space.dtype)}
        return None if low is None or high is None or math.prod(space.shape) > _LARGEST else {**name, **data}
    if isinstance(space, spaces.Dict | spaces.Tuple) and kind in (spaces.Dict, spaces.Tuple) and depth < _DEEPEST:
        pairs = space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces)
        inner = [[key, space_as_json(one, depth + 1)] for key, one in pairs]
        named = all(one is not None and isinstance(key, str | int) for key, one in inner)
        return {**name, "spaces": inner} if named else None
    return None


def space_from_json(data: Any) -> Space:
    """Build a space from the JSON of `space_as_json`, which may be untrusted. Raises ValueError if it is invalid."""
    try:
        return _build(dict(data), 0, [_PARTS, _LARGEST])
    except (KeyError, TypeError, AssertionError, OverflowError) as error:
        raise ValueError(f"not a space that rein supports: {data!r:.80}: {error}") from error


def _build(data: Mapping[str, Any], depth: int, left: list[int]) -> Space:
    """Build a space. `left` has the numbers of parts and entries that further parts may have."""
    kind = data["space"]
    left[0] -= 1
    if left[0] < 0:
        raise ValueError(f"a space has more than {_PARTS:,} parts")
    if kind == "Discrete":
        return spaces.Discrete(int(data["n"]), start=int(data["start"]), dtype=_dtype(data, "iu"))
    if kind == "MultiDiscrete":
        dtype = _dtype(data, "iu")
        return spaces.MultiDiscrete(np.array(data["nvec"], dtype), dtype=dtype, start=np.array(data["start"], dtype))
    if kind == "MultiBinary":
        shape = _shape([data["n"]] if isinstance(data["n"], int) else data["n"], left)
        return spaces.MultiBinary(shape[0] if isinstance(data["n"], int) else shape)
    if kind == "Box":
        shape, dtype = _shape(data["shape"], left), _dtype(data, "iufb")
        low, high = (np.array(np.broadcast_to(np.array(data[side], dtype), shape)) for side in ("low", "high"))
        return spaces.Box(low, high, dtype=dtype)
    if kind in ("Dict", "Tuple") and depth < _DEEPEST:
        inner = OrderedDict((key, _build(dict(one), depth + 1, left)) for key, one in data["spaces"])
        return spaces.Dict(inner) if kind == "Dict" else spaces.Tuple(list(inner.values()))
    raise ValueError(f"not a kind of space that rein supports: {kind!r:.80}")


def _bound(bound: np.ndarray[Any, Any]) -> Any:
    """Return one number if all bounds are equal, otherwise a list, or None if the list would be too long."""
    if bound.size and (bound == bound.flat[0]).all():
        return bound.flat[0].item()
    return bound.tolist() if bound.size <= _LISTED else None


def _shape(data: Any, left: list[int]) -> tuple[int, ...]:
    shape = tuple(int(length) for length in data)
    left[1] -= math.prod(shape)
    if min(shape, default=0) < 0 or left[1] < 0:
        raise ValueError(f"invalid shape of a space, {shape!s:.80}: at most {_LARGEST:,} entries are allowed")
    return shape


def _dtype(data: Mapping[str, Any], kinds: str) -> Any:
    dtype = np.dtype(str(data["dtype"]))
    if dtype.kind not in kinds:
        raise ValueError(f"invalid dtype of a space: {dtype}")
    return dtype.type
