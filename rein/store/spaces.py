"""Gymnasium's spaces as JSON and back, so that a file says what its agent was built for."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium import spaces

Space = spaces.Space[Any]

_LARGEST = 1 << 24  # numbers of a space that a file may ask for
_LISTED = 1 << 12  # bounds that are written one by one
_DEEPEST = 8  # spaces within spaces


def describe_build(part: Any) -> dict[str, Any] | None:
    """The full name of an agent's class and its spaces; None for what has none, or has some that JSON cannot say."""
    observation, action = getattr(part, "observation_space", None), getattr(part, "action_space", None)
    if not (isinstance(observation, spaces.Space) and isinstance(action, spaces.Space)):
        return None
    said = {"observation_space": space_as_json(observation), "action_space": space_as_json(action)}
    named = {"class": f"{type(part).__module__}.{type(part).__qualname__}"}
    return None if None in said.values() else {**named, **said}


def space_as_json(space: Space) -> dict[str, Any] | None:
    """What `space_from_json` makes an equal space of; None for a kind that it does not know."""
    kind = type(space)  # a subclass may mean something else
    name = {"space": kind.__name__}
    if isinstance(space, spaces.Discrete) and kind is spaces.Discrete:
        return {**name, "n": int(space.n), "start": int(space.start), "dtype": str(space.dtype)}
    if isinstance(space, spaces.MultiDiscrete) and kind is spaces.MultiDiscrete:
        return {**name, "nvec": space.nvec.tolist(), "start": space.start.tolist(), "dtype": str(space.dtype)}
    if isinstance(space, spaces.MultiBinary) and kind is spaces.MultiBinary:
        return {**name, "n": space.n if isinstance(space.n, int) else list(space.n)}
    if isinstance(space, spaces.Box) and kind is spaces.Box:
        low, high = _bound(space.low), _bound(space.high)
        said = {"low": low, "high": high, "shape": list(space.shape), "dtype": str(space.dtype)}
        return None if low is None or high is None else {**name, **said}
    if isinstance(space, spaces.Dict | spaces.Tuple) and kind in (spaces.Dict, spaces.Tuple):
        pairs = space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces)
        inner = [[key, space_as_json(one)] for key, one in pairs]
        named = all(one is not None and isinstance(key, str | int) for key, one in inner)
        return {**name, "spaces": inner} if named else None
    return None


def space_from_json(said: Any, depth: int = 0) -> Space:
    """The space that `space_as_json` gave. Raises ValueError for anything else; `said` may be anybody's."""
    try:
        return _made(dict(said), depth)
    except (KeyError, TypeError, AssertionError, OverflowError) as error:
        raise ValueError(f"no space that rein knows is {said!r:.80}: {error}") from error


def _made(said: Mapping[str, Any], depth: int) -> Space:
    kind = said["space"]
    if kind == "Discrete":
        return spaces.Discrete(int(said["n"]), start=int(said["start"]), dtype=_dtype(said, "iu"))
    if kind == "MultiDiscrete":
        dtype = _dtype(said, "iu")
        return spaces.MultiDiscrete(np.array(said["nvec"], dtype), dtype=dtype, start=np.array(said["start"], dtype))
    if kind == "MultiBinary":
        shape = _shape([said["n"]] if isinstance(said["n"], int) else said["n"])
        return spaces.MultiBinary(shape[0] if isinstance(said["n"], int) else shape)
    if kind == "Box":
        shape, dtype = _shape(said["shape"]), _dtype(said, "iufb")
        low, high = (np.array(np.broadcast_to(np.array(said[side], dtype), shape)) for side in ("low", "high"))
        return spaces.Box(low, high, dtype=dtype)
    if kind in ("Dict", "Tuple") and depth < _DEEPEST:
        inner = OrderedDict((key, space_from_json(one, depth + 1)) for key, one in said["spaces"])
        return spaces.Dict(inner) if kind == "Dict" else spaces.Tuple(list(inner.values()))
    raise ValueError(f"no space that rein knows is {kind!r:.80}")


def _bound(bound: np.ndarray[Any, Any]) -> Any:
    """One number where all are the same, else a list; None where that would be too long."""
    if bound.size and (bound == bound.flat[0]).all():
        return bound.flat[0].item()
    return bound.tolist() if bound.size <= _LISTED else None


def _shape(said: Any) -> tuple[int, ...]:
    shape = tuple(int(length) for length in said)
    if min(shape, default=0) < 0 or math.prod(shape) > _LARGEST:
        raise ValueError(f"a space of {shape} numbers is none that a file may ask for")
    return shape


def _dtype(said: Mapping[str, Any], kinds: str) -> Any:
    dtype = np.dtype(str(said["dtype"]))
    if dtype.kind not in kinds:
        raise ValueError(f"a space of {dtype} is none")
    return dtype.type
