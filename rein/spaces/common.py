"""Common spaces of the agents of a world, and values that are padded to them.

All rows of an environment have one space. Vectors of different sizes are padded with zeros, and `Discrete` spaces of
different sizes get the largest number of actions.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

from rein.errors import EnvironmentContractError
from rein.spaces import RESERVED


def common_space(name: str, what: str, all_spaces: Sequence[spaces.Space[Any]]) -> spaces.Space[Any]:
    """Return a space that contains the values of all spaces. Raises TypeError if there is none."""
    first = all_spaces[0]
    if all(space == first for space in all_spaces):
        return first
    if all(isinstance(space, spaces.Discrete) and space.start == 0 for space in all_spaces):
        return max(all_spaces, key=lambda space: space.n)  # type: ignore[attr-defined]  # they are Discrete
    if all(isinstance(space, spaces.Box) and space.shape and len(space.shape) == 1 for space in all_spaces):
        boxes: Any = all_spaces
        size = max(box.shape[0] for box in boxes)
        low, high = (
            functools.reduce(smaller, [np.pad(bound, (0, size - len(bound))) for bound in bounds])
            for smaller, bounds in ((np.minimum, [box.low for box in boxes]), (np.maximum, [box.high for box in boxes]))
        )
        return spaces.Box(low, high, dtype=np.result_type(*[box.dtype for box in boxes]).type)
    if all(isinstance(space, spaces.MultiBinary) and isinstance(space.n, int) for space in all_spaces):
        return max(all_spaces, key=lambda space: space.n)  # type: ignore[attr-defined]  # they are MultiBinary
    if what == "observation" and all(isinstance(space, spaces.Dict) for space in all_spaces):
        parts: Any = [space.spaces for space in all_spaces]  # type: ignore[attr-defined]  # they are Dict
        if all(part.keys() == parts[0].keys() for part in parts):
            return spaces.Dict({key: common_space(name, what, [part[key] for part in parts]) for key in parts[0]})
    advice = "spaces of different sizes must all be Discrete or Box vectors"
    if all(isinstance(space, spaces.Discrete) for space in all_spaces):
        advice = "Discrete spaces of different sizes must start at 0"
    raise TypeError(f"{name}: the {what} spaces of the agents differ: {', '.join(map(str, all_spaces))}; {advice}")


def with_agent_id(name: str, all_spaces: Sequence[spaces.Space[Any]]) -> list[spaces.Space[Any]]:
    """Return the spaces of agents whose padded vectors are followed by a one-hot vector of the agent.

    Raises TypeError if the observations of an agent, without reserved entries, are not vectors of floats.
    """
    keys = [_vector_key(space) for space in all_spaces]
    vectors = [space if key is None else space[key] for space, key in zip(all_spaces, keys, strict=True)]  # type: ignore[index]  # a Dict
    for space in vectors:
        if not isinstance(space, spaces.Box) or len(space.shape) != 1 or space.dtype.kind != "f":
            raise TypeError(f"{name}: agent_id=True needs observations that are vectors of floats, got {space}")
    space: Any = common_space(name, "observation", vectors)
    agents = len(all_spaces)
    low, high = np.append(space.low, np.zeros(agents)), np.append(space.high, np.ones(agents))
    longer = spaces.Box(low.astype(space.dtype), high.astype(space.dtype), dtype=space.dtype.type)
    return [
        longer if key is None else spaces.Dict({**space.spaces, key: longer})  # type: ignore[attr-defined]  # a Dict
        for space, key in zip(all_spaces, keys, strict=True)
    ]


def _vector_key(space: spaces.Space[Any]) -> str | None:
    """Return the key of the only entry of a Dict that is not reserved."""
    keys = [key for key in space.spaces if key not in RESERVED] if isinstance(space, spaces.Dict) else []
    return keys[0] if len(keys) == 1 else None


def append_agent_id(observation: Any, space: spaces.Space[Any], agent: int, agents: int) -> Any:
    """Return an observation whose vector is padded and followed by a one-hot vector of the agent."""
    if (key := _vector_key(space)) is not None:
        return {**observation, key: append_agent_id(observation[key], space[key], agent, agents)}  # type: ignore[index]  # a Dict
    row = padded(observation, space)
    row[len(row) - agents + agent] = 1.0
    return row


def masks_of_sizes(common: spaces.Space[Any], all_spaces: Sequence[Any]) -> list[np.ndarray[Any, Any]] | None:
    """Return the mask of the actions that each agent has; None if all agents have the same number."""
    if not isinstance(common, spaces.Discrete) or all(space.n == common.n for space in all_spaces):
        return None
    return [(np.arange(common.n) < space.n).astype(np.int8) for space in all_spaces]


def check_sizes(what: str, value: Any, space: spaces.Space[Any]) -> None:
    """Raise EnvironmentContractError for a vector of another size, which padding would hide."""
    if isinstance(space, spaces.Dict):
        for key in value.keys() & space.keys() if isinstance(value, Mapping) else ():
            check_sizes(f"{what}, {key}", value[key], space[key])
    elif isinstance(space, spaces.Box | spaces.MultiBinary):
        try:
            shape = np.shape(value)
        except ValueError:  # lists of different lengths
            shape = None
        if shape != space.shape:
            raise EnvironmentContractError(f"{what}: expected shape {space.shape}, got {shape or repr(value)}")


def padded(value: Any, space: spaces.Space[Any]) -> Any:
    """Return a copy of a value, with vectors padded with zeros to the size of the space."""
    if isinstance(value, Mapping) and isinstance(space, spaces.Dict):
        return {key: padded(part, space[key]) if key in space.spaces else part for key, part in value.items()}
    if isinstance(space, spaces.Tuple | spaces.Dict):
        return copy.deepcopy(value)
    array = np.array(value)
    if array.ndim != 1 or array.shape >= (space.shape or ()):
        return array
    row = np.zeros(space.shape or (), space.dtype)
    row[: len(array)] = array
    return row
