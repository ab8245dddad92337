"""Action masks: their spaces, their values, and whether those in observations allow an action.

Shapes: R environments, A choices of all integers of an action, K integers, E environments without a valid action.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
from gymnasium import spaces
from torch import Tensor

from rein.errors import EnvironmentContractError
from rein.spaces import ACTION_MASK, children, choices, entry, is_continuous
from rein.types import Tree

MASK_HINT = (
    "a mask has 1 for each valid action and 0 for the others; if it is added to logits (0 and -inf), give `mask == 0`"
)

# path of a mask, where the choices of each integer begin, and whether its space allows other numbers than 0 and 1
_Place = tuple[tuple[str, ...], np.ndarray[Any, Any], bool]

_places_of: dict[tuple[int, int], tuple[Any, Any, list[_Place]]] = {}  # by id: spaces are not hashable


def check_masks(
    observation: Tree,
    observation_space: spaces.Space[Any],
    action_space: spaces.Space[Any],
    must_act: Tensor | np.ndarray[Any, Any] | None = None,
    rows: Sequence[int] | None = None,
    *,
    waits: bool = False,
) -> None:
    """Check masks and that every environment has a valid action, if observations have the entry `action_mask`.

    Each integer of a MultiDiscrete and each part of a Dict or Tuple needs a valid choice.

    Args:
        observation: `(R, *O)`.
        observation_space: space of one observation.
        action_space: space of one action.
        must_act: (R,) bool, rows that need a valid action. By default all rows.
        rows: (R,) environment indices of the rows. By default the row numbers.
        waits: check masks on another device than the host, too, and wait for the device.

    Raises:
        EnvironmentContractError: with the index of the first environment with a wrong mask or without a valid action.
    """
    if not isinstance(observation, dict) or ACTION_MASK not in observation:
        return
    for path, start_K, is_open in _places(observation_space, action_space):
        mask: Any = functools.reduce(operator.getitem, path, observation)
        if not mask.is_cpu and not waits:
            return
        mask_RA, field = mask.numpy(force=waits), f"observation.{'.'.join(path)}, environment"
        if is_open and (wrong_RA := wrong_values(mask_RA)) is not None:
            row = int(np.argwhere(wrong_RA)[0, 0])
            refuse_mask(f"{field} {row if rows is None else rows[row]}", mask_RA[row].tolist())
        some_R = mask_RA.any(1) if len(start_K) == 1 else np.logical_or.reduceat(mask_RA, start_K, axis=1).all(1)
        if some_R.all():
            continue
        if waits and isinstance(must_act, Tensor):
            must_act = must_act.numpy(force=True)
        row_E = np.flatnonzero(~some_R if must_act is None else ~some_R & np.asarray(must_act))
        if len(row_E):
            row = int(row_E[0])
            raise EnvironmentContractError(
                f"{field} {row if rows is None else rows[row]}: expected a valid action until the episode ends, got"
                f" {mask_RA[row].tolist()}"
            )


def wrong_values(mask: np.ndarray[Any, Any]) -> np.ndarray[Any, Any] | None:
    """Return which values of a mask are negative, fractional or not finite; None if there are none."""
    if mask.dtype.kind in "bu":
        return None
    wrong = mask < 0
    if mask.dtype.kind == "f":
        wrong |= ~np.isfinite(mask) | (mask != np.trunc(mask))
    return wrong if wrong.any() else None


def refuse_mask(who: str, mask: Any) -> NoReturn:
    """Raise EnvironmentContractError for a mask with wrong values."""
    raise EnvironmentContractError(f"{who}: expected an action mask of 0 and 1, got {mask!r:.200}; {MASK_HINT}")


def _places(observation_space: spaces.Space[Any], action_space: spaces.Space[Any]) -> list[_Place]:
    """Return the masks of an observation, from a cache."""
    key = id(observation_space), id(action_space)
    if key not in _places_of:
        if len(_places_of) >= 64:
            _places_of.clear()
        space = entry(observation_space, ACTION_MASK)
        places = [] if space is None else list(_find(space, action_space, (ACTION_MASK,)))
        _places_of[key] = observation_space, action_space, places
    return _places_of[key][2]


def _find(mask: spaces.Space[Any], action: spaces.Space[Any], path: tuple[str, ...]) -> Iterator[_Place]:
    inner, actions = children(mask), children(action)
    if inner is None and actions is None and not is_continuous(action):
        yield path, np.cumsum([0, *choices(action)[0][:-1]]), not isinstance(mask, spaces.MultiBinary)
    for name in (inner or {}).keys() & (actions or {}).keys():
        yield from _find(inner[name], actions[name], (*path, name))  # type: ignore[index]  # both have the name


def mask_space(action_space: spaces.Space[Any]) -> spaces.Space[Any] | None:
    """Return the space of action masks; None if no part of the action is discrete.

    The space is MultiBinary with a number for each choice, or a Dict of the masks of the discrete parts.
    """
    inner = children(action_space)
    if inner is None:
        return None if is_continuous(action_space) else spaces.MultiBinary(sum(choices(action_space)[0]))
    parts = {name: mask for name, part in inner.items() if (mask := mask_space(part)) is not None}
    return spaces.Dict(parts) if parts else None


def folded_space(space: spaces.Space[Any], mask: spaces.Space[Any]) -> spaces.Dict:
    """Return the space of observations with the entry `action_mask`."""
    return spaces.Dict(folded(space.spaces if isinstance(space, spaces.Dict) else space, mask))


def folded(observation: Any, mask: Any) -> dict[str, Any]:
    """Return an observation with the entry `action_mask`."""
    others = observation if isinstance(observation, Mapping) else {"observation": observation}
    return {**others, ACTION_MASK: mask}


def as_mask(space: spaces.Space[Any], mask: Any, who: str) -> Any:
    """Return one action mask as a value of its `mask_space`. None allows every action.

    The mask of several integers is concatenated, or a tuple with a mask for each. The mask of a Tuple is a tuple.
    Raises EnvironmentContractError, whose message begins with `who`, for anything else.
    """
    if isinstance(space, spaces.Dict):
        if mask is None or isinstance(mask, tuple | list) or _has_known_keys(mask, space):
            return {name: as_mask(part, _part(mask, name), f"{who}.{name}") for name, part in space.spaces.items()}
    elif mask is None:
        return np.ones(space.shape or (), np.int8)
    else:
        try:
            several = isinstance(mask, tuple | list)
            flat = np.concatenate([np.ravel(part) for part in mask]) if several else np.asarray(mask)
        except ValueError:  # an empty list, or parts of different shapes
            flat = np.array(None)
        if is_mask(flat, space.shape):
            allowed = (flat != 0).astype(np.int8)
            if allowed.tobytes() != flat.tobytes() and wrong_values(flat) is not None:
                refuse_mask(who, mask)
            return allowed
    raise EnvironmentContractError(f"{who}: expected an action mask of {space}, got {mask!r:.200}")


def is_mask(value: np.ndarray[Any, Any], shape: tuple[int, ...] | None) -> bool:
    """Return whether an array has the shape and a dtype of a mask."""
    return value.shape == shape and value.dtype.kind in "biuf"


def _has_known_keys(mask: Any, space: spaces.Dict) -> bool:
    """Return whether a mask is a dictionary of parts of the space. Other keys may have None."""
    return isinstance(mask, Mapping) and all(mask[key] is None for key in mask.keys() - space.spaces.keys())


def _part(mask: Any, name: str) -> Any:
    if isinstance(mask, tuple | list):
        return mask[int(name)] if name.isdecimal() and int(name) < len(mask) else None
    return None if mask is None else mask.get(name)
