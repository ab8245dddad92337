"""Results of simulators: checks of what `reset` and `step` return, and action masks in their infos.

Shapes: N environments, R rows of them.
"""

from __future__ import annotations

import logging
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from rein.envs.base.contract import SUCCESS
from rein.errors import EnvironmentContractError
from rein.spaces import ACTION_MASK, entry
from rein.spaces.conversion import Codec, column
from rein.spaces.masks import as_mask, folded, folded_space, is_mask, mask_space, refuse_mask, wrong_values
from rein.types import Tree

logger = logging.getLogger(__name__)

RESET = ("observation", "info")
STEP = ("observation", "reward", "terminated", "truncated", "info")
_BOOL = np.dtype(np.bool_)
_UNKNOWN = np.array(-1, np.int8)  # success in infos that do not report it

_warned: set[str] = set()  # ids and factories


def check_parts(who: str, method: str, result: Any, parts: tuple[str, ...]) -> None:
    """Raise EnvironmentContractError unless `result`, returned by `method` of `who`, has these parts."""
    if not isinstance(result, tuple | list) or len(result) != len(parts):
        wanted, got = ", ".join(parts), reprlib.repr(result)
        raise EnvironmentContractError(f"{who}: expected ({wanted}) from {method}, got {got}")


def missing_values(info: Mapping[str, Any] | None) -> dict[str, np.ndarray[Any, Any]]:
    """Return the default values of the option `info` as arrays, and of success; float64 becomes float32.

    Raises TypeError unless `info` is None or a dictionary of numbers, booleans or arrays of these.
    """
    info = {} if info is None else info
    if not isinstance(info, Mapping):
        raise TypeError(f"info={info!r}: give a dictionary of names and default values, such as {{'success': False}}")
    return {SUCCESS[0]: _UNKNOWN} | {key: _missing_value(key, value) for key, value in info.items()}


def requested(infos: Mapping[str, np.ndarray[Any, Any]]) -> dict[str, Any]:
    """Return the option `info` as JSON."""
    return {key: missing.tolist() for key, missing in infos.items() if not reports_success(key, missing)}


def reports_success(key: str, missing: np.ndarray[Any, Any]) -> bool:
    """Return whether an entry is the success that is read without the option `info`: 1, 0, or -1 if it is unknown."""
    return key == SUCCESS[0] and missing.dtype == _UNKNOWN.dtype and not missing.shape and bool(missing == _UNKNOWN)


def _success(info: Any) -> int:
    """Return the success that an info reports. Entries that are not a number are ignored."""
    for name in SUCCESS if isinstance(info, Mapping) else ():
        value = info.get(name)
        if value is not None and np.size(value) == 1 and (array := np.asarray(value)).dtype.kind in "biuf":
            return int((array > 0).all())
    return -1


def ended_flags(
    terminateds: tuple[Any, ...], truncateds: tuple[Any, ...], rows: Sequence[Any]
) -> np.ndarray[Any, np.dtype[np.bool_]] | None:
    """Return `terminated` and `truncated` as one array (2, R), or None if no episode ended.

    `rows` has the rows for error messages. Raises EnvironmentContractError for a flag that is not a boolean.
    """
    nothing = (False,) * len(rows)
    try:
        if terminateds == nothing and truncateds == nothing:
            return None
    except (ValueError, RuntimeError):  # a flag is an array of several values, which `column` refuses
        pass
    flags_2R = np.empty((2, len(rows)), _BOOL)
    flags_2R[0] = column("terminated", terminateds, _BOOL, rows=rows)
    flags_2R[1] = column("truncated", truncateds, _BOOL, rows=rows)
    return flags_2R


def wanted_infos(infos: Sequence[Any], key: str, missing: np.ndarray[Any, Any], rows: Sequence[Any]) -> Tensor:
    """Return the entry `key` of R infos as a new tensor (R, ...). `rows` has the rows for error messages.

    Raises EnvironmentContractError if a value does not have the dtype and shape of the default value `missing`.
    """
    if reports_success(key, missing):
        return torch.tensor([_success(info) for info in infos], dtype=torch.int8, device="cpu")
    try:
        values = [info.get(key, missing) for info in infos]
    except AttributeError:
        for row, info in zip(rows, infos, strict=True):
            if not isinstance(info, Mapping):
                raise EnvironmentContractError(f"info, row {row}: expected a dictionary, got {info!r}") from None
        raise
    return torch.from_numpy(column(f"info.{key}", values, missing.dtype, missing.shape, rows))


def _missing_value(key: str, value: Any) -> np.ndarray[Any, Any]:
    try:
        array = np.asarray(value)
    except ValueError:  # the shapes differ
        array = np.array(None)
    if array.dtype.kind not in "biuf":
        raise TypeError(
            f"info={{{key!r}: {value!r}}}: the default value must be a number, a boolean or an array of these; use a"
            " wrapper to flatten nested dictionaries"
        )
    return array.astype(np.float32) if array.dtype == np.float64 else array


def warn_of_mask(name: str) -> None:
    """Log a warning, once for each id or factory, that the infos of a reset have action masks that are not used."""
    if name not in _warned:
        _warned.add(name)
        logger.warning(
            "%s: info['action_mask'] is not used. Give action_mask=True to add it to the observation, so that agents"
            " choose valid actions only, or action_mask=False to omit this warning",
            name,
        )


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


def check_has_mask(name: str, info: Any) -> None:
    """Raise EnvironmentContractError if the info of a reset has no action mask."""
    if isinstance(info, Mapping) and ACTION_MASK not in info:
        raise EnvironmentContractError(
            f"{name}: action_mask=True: expected info['action_mask'] from reset, got {dict(info)!r:.200}; omit"
            " action_mask=True, or let the environment return masks in reset and step"
        )


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
        value, has_mask_N = info.get(ACTION_MASK), info.get(f"_{ACTION_MASK}")
        if isinstance(value, np.ndarray) and is_mask(value, (self._num_envs, *(self.space.shape or ()))):
            missing_N1 = np.False_ if has_mask_N is None else ~np.asarray(has_mask_N, np.bool_)[:, None]
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
        value, has_mask_N = info[name], info.get(f"_{name}")
        if has_mask_N is not None and not has_mask_N[row]:
            return None
        if not isinstance(value, Mapping):
            return value[row]
        return {key: self._row(value, key, row) for key in value if not key.startswith("_") or key[1:] not in value}
