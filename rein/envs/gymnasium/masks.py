"""Action masks of Gymnasium environments, which `info["action_mask"]` contains, as an entry of the observation.

Shapes: N environments, R rows of them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces

from rein.envs.base.masks import refuse_mask, wrong_values
from rein.envs.base.spaces import Codec
from rein.errors import EnvironmentContractError
from rein.networks.heads import choices, is_continuous
from rein.networks.observation_spaces import ACTION_MASK, children, entry
from rein.types import Tree

logger = logging.getLogger(__name__)

_warned: set[str] = set()  # ids and factories


def warn_of_mask(name: str, info: Any) -> None:
    """Log a warning, once for each id or factory, if the info of a reset has an action mask that is not used."""
    if isinstance(info, Mapping) and ACTION_MASK in info and name not in _warned:
        _warned.add(name)
        logger.warning(
            "%s: info['action_mask'] is not used. Give action_mask=True to add it to the observation, so that agents"
            " choose valid actions only, or action_mask=False to omit this warning",
            name,
        )


def mask_space(action_space: spaces.Space[Any]) -> spaces.Space[Any] | None:
    """Return the space of action masks; None if no part of the action is discrete.

    The space is MultiBinary with a number for each choice, or a Dict of the masks of the discrete parts.
    """
    inner = children(action_space)
    if inner is None:
        return None if is_continuous(action_space) else spaces.MultiBinary(sum(choices(action_space)[0]))
    parts = {name: mask for name, part in inner.items() if (mask := mask_space(part)) is not None}
    return spaces.Dict(parts) if parts else None


def missing_masks(name: str, environment: Any, action_space: spaces.Space[Any]) -> spaces.Space[Any] | None:
    """Return the space of the masks to add; None if the observations have the entry `action_mask` already.

    Raises ValueError if no part of the action is discrete.
    """
    space = getattr(environment, "single_observation_space", environment.observation_space)
    if entry(space, ACTION_MASK) is not None:
        return None
    if (masks := mask_space(action_space)) is None:
        raise ValueError(f"{name}: action_mask=True: only discrete actions have masks, got {action_space}")
    return masks


def folded_space(space: spaces.Space[Any], mask: spaces.Space[Any]) -> spaces.Dict:
    """Return the space of observations with the entry `action_mask`."""
    return spaces.Dict(folded(space.spaces if isinstance(space, spaces.Dict) else space, mask))


def folded(observation: Any, mask: Any) -> dict[str, Any]:
    """Return an observation with the entry `action_mask`."""
    others = observation if isinstance(observation, Mapping) else {"observation": observation}
    return {**others, ACTION_MASK: mask}


def check_has_mask(name: str, info: Any) -> None:
    """Raise EnvironmentContractError if the info of a reset has no action mask."""
    if isinstance(info, Mapping) and ACTION_MASK not in info:
        raise EnvironmentContractError(
            f"{name}: action_mask=True: expected info['action_mask'] from reset, got {dict(info)!r:.200}; omit"
            " action_mask=True, or let the environment return masks in reset and step"
        )


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
        if _is_mask(flat, space.shape):
            allowed = (flat != 0).astype(np.int8)
            if allowed.tobytes() != flat.tobytes() and wrong_values(flat) is not None:
                refuse_mask(who, mask)
            return allowed
    raise EnvironmentContractError(f"{who}: expected an action mask of {space}, got {mask!r:.200}")


def _is_mask(value: np.ndarray[Any, Any], shape: tuple[int, ...] | None) -> bool:
    return value.shape == shape and value.dtype.kind in "biuf"


def _has_known_keys(mask: Any, space: spaces.Dict) -> bool:
    """Return whether a mask is a dictionary of parts of the space. Other keys may have None."""
    return isinstance(mask, Mapping) and all(mask[key] is None for key in mask.keys() - space.spaces.keys())


def _part(mask: Any, name: str) -> Any:
    if isinstance(mask, tuple | list):
        return mask[int(name)] if name.isdecimal() and int(name) < len(mask) else None
    return None if mask is None else mask.get(name)


class FoldedMask(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Adds `info["action_mask"]` to the observation as the entry `action_mask`. A step without a mask allows all."""

    def __init__(self, env: Any, name: str, space: spaces.Space[Any]) -> None:
        super().__init__(env)
        self._name, self._mask_space = name, space
        self.observation_space = folded_space(env.observation_space, space)

    def reset(self, **kwargs: Any) -> Any:
        """Reset the environment. Raises EnvironmentContractError if the info has no action mask."""
        result = self.env.reset(**kwargs)
        if _has_parts(result, 2):
            check_has_mask(self._name, result[1])
        return self._folded(result, 2)

    def step(self, action: Any) -> Any:
        """Step the environment."""
        return self._folded(self.env.step(action), 5)

    def _folded(self, result: Any, parts: int) -> Any:
        if not _has_parts(result, parts) or not isinstance(result[-1], Mapping):  # refused by the adapter
            return result
        mask = as_mask(self._mask_space, result[-1].get(ACTION_MASK), f"{self._name}: info.{ACTION_MASK}")
        return folded(result[0], mask), *result[1:]


def _has_parts(result: Any, parts: int) -> bool:
    return isinstance(result, tuple | list) and len(result) == parts


def with_mask(environment: Any, name: str) -> Any:
    """Return an environment whose observations have the entry `action_mask`."""
    space = missing_masks(name, environment, environment.action_space)
    return environment if space is None else FoldedMask(environment, name, space)


class BatchedMasks:
    """Reads the action masks of N environments from the infos of a vector environment.

    Environments without a mask, for which `_action_mask` is False, have masks that allow all actions.
    """

    def __init__(self, name: str, space: spaces.Space[Any], num_envs: int) -> None:
        self.space, self._name, self._num_envs = space, name, num_envs
        self._codec = Codec(f"observation.{ACTION_MASK}", space)

    def read(self, info: Mapping[str, Any]) -> Tree:
        """Return masks (N, A) as tensors, or a dictionary of them."""
        value, given_N = info.get(ACTION_MASK), info.get(f"_{ACTION_MASK}")
        if isinstance(value, np.ndarray) and _is_mask(value, (self._num_envs, *(self.space.shape or ()))):
            missing_N1 = np.False_ if given_N is None else ~np.asarray(given_N, np.bool_)[:, None]
            if (wrong_NA := wrong_values(np.where(missing_N1, value.dtype.type(0), value))) is not None:
                row = int(np.argwhere(wrong_NA)[0, 0])
                refuse_mask(f"{self._name}: info.{ACTION_MASK}, row {row}", value[row])
            return torch.from_numpy(((value != 0) | missing_N1).astype(np.int8))
        rows = [self._row(info, ACTION_MASK, row) for row in range(self._num_envs)]
        who = f"{self._name}: info.{ACTION_MASK}"
        return self._codec.stack([as_mask(self.space, mask, f"{who}, row {n}") for n, mask in enumerate(rows)])

    def _row(self, info: Any, name: str, row: int) -> Any:
        """Return the mask of one environment, None without one."""
        if not isinstance(info, Mapping) or name not in info:
            return None
        value, given_N = info[name], info.get(f"_{name}")
        if given_N is not None and not given_N[row]:
            return None
        if not isinstance(value, Mapping):
            return value[row]
        return {key: self._row(value, key, row) for key in value if not key.startswith("_") or key[1:] not in value}
