"""Check that action masks in observations allow an action.

Shapes: R environments, A choices of all integers of an action, K integers, E environments without a valid action.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces
from torch import Tensor

from rein.errors import EnvironmentContractError
from rein.networks.encoder import children
from rein.networks.heads import choices, is_continuous
from rein.networks.reserved import ACTION_MASK, entry
from rein.types import Tree

_Place = tuple[tuple[str, ...], np.ndarray[Any, Any]]  # path of a mask, and where the choices of each integer begin

_known: dict[tuple[int, int], tuple[Any, Any, list[_Place]]] = {}  # by id: spaces are not hashable


def check_masks(
    observation: Tree,
    observation_space: spaces.Space[Any],
    action_space: spaces.Space[Any],
    must_act: Tensor | np.ndarray[Any, Any] | None = None,
    rows: Sequence[int] | None = None,
) -> None:
    """Check that every environment has a valid action, if observations have the entry `action_mask`.

    Each integer of a MultiDiscrete and each part of a Dict or Tuple needs a valid choice. Masks on another device than
    the host are skipped, because reading them would wait for the device.

    Args:
        observation: `(R, *O)`.
        observation_space: space of one observation.
        action_space: space of one action.
        must_act: (R,) bool, rows to check. By default all rows.
        rows: (R,) environment indices of the rows. By default the row numbers.

    Raises:
        EnvironmentContractError: with the index of the first environment without a valid action.
    """
    if not isinstance(observation, dict) or ACTION_MASK not in observation:
        return
    for path, start_K in _places(observation_space, action_space):
        mask: Any = functools.reduce(operator.getitem, path, observation)
        if not mask.is_cpu:
            return
        mask_RA = mask.numpy()
        some_R = mask_RA.any(1) if len(start_K) == 1 else np.logical_or.reduceat(mask_RA, start_K, axis=1).all(1)
        if some_R.all():
            continue
        row_E = np.flatnonzero(~some_R if must_act is None else ~some_R & np.asarray(must_act))
        if len(row_E):
            row = int(row_E[0])
            raise EnvironmentContractError(
                f"observation.{'.'.join(path)}, environment {row if rows is None else rows[row]}: expected a valid"
                f" action until the episode ends, got {mask_RA[row].tolist()}"
            )


def _places(observation_space: spaces.Space[Any], action_space: spaces.Space[Any]) -> list[_Place]:
    """Return the masks of an observation, from a cache."""
    key = id(observation_space), id(action_space)
    if key not in _known:
        if len(_known) >= 64:
            _known.clear()
        space = entry(observation_space, ACTION_MASK)
        found = [] if space is None else list(_find(space, action_space, (ACTION_MASK,)))
        _known[key] = observation_space, action_space, found
    return _known[key][2]


def _find(mask: spaces.Space[Any], action: spaces.Space[Any], path: tuple[str, ...]) -> Iterator[_Place]:
    inner, actions = children(mask), children(action)
    if inner is None and actions is None and not is_continuous(action):
        yield path, np.cumsum([0, *choices(action)[0][:-1]])
    for name in (inner or {}).keys() & (actions or {}).keys():
        yield from _find(inner[name], actions[name], (*path, name))  # type: ignore[index]  # both have the name
