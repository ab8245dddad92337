"""Checks of what `reset` and `step` return: the number of parts, the flags and the wanted infos.

Shapes: N environments.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rein.errors import EnvironmentContractError
from rein.rollout.spaces import column

RESET = ("observation", "info")
STEP = ("observation", "reward", "terminated", "truncated", "info")
_BOOL = np.dtype(np.bool_)


def check_parts(who: str, method: str, result: Any, parts: tuple[str, ...]) -> None:
    """EnvironmentContractError unless `result`, of a method of `who`, has these parts."""
    if not isinstance(result, tuple | list) or len(result) != len(parts):
        wanted, got = ", ".join(parts), reprlib.repr(result)
        raise EnvironmentContractError(f"{who}: expected ({wanted}) from {method}, got {got}")


def missing_values(info: Mapping[str, Any] | None) -> dict[str, np.ndarray[Any, Any]]:
    """What `info=` names, each with the value for steps without it, as an array; float64 becomes float32.

    Raises TypeError for what is no dictionary of numbers, booleans or arrays of them.
    """
    if info is None:
        return {}
    if not isinstance(info, Mapping):
        raise TypeError(f"info={info!r}: give names, each with the value for steps without it: {{'success': False}}")
    return {key: _missing_value(key, value) for key, value in info.items()}


def ended_flags(
    terminateds: tuple[Any, ...], truncateds: tuple[Any, ...], nobody: tuple[bool, ...], rows: Sequence[int]
) -> np.ndarray[Any, np.dtype[np.bool_]] | None:
    """Return `terminated` and `truncated` as one array (2, N), or None if both equal `nobody`, N times False.

    Raises EnvironmentContractError for a flag that is not a boolean.
    """
    try:
        if terminateds == nobody and truncateds == nobody:
            return None
    except (ValueError, RuntimeError):  # one is an array of several, which `column` refuses by its name
        pass
    flags = (("terminated", terminateds), ("truncated", truncateds))
    return np.stack([column(field, values, _BOOL, rows=rows) for field, values in flags])


def wanted_infos(infos: Sequence[Any], key: str, missing: np.ndarray[Any, Any], rows: Sequence[int]) -> Tensor:
    """Return what N infos have under `key` as a fresh tensor (N, ...); `rows` are the row numbers that errors name.

    Raises EnvironmentContractError if a value does not fit the missing value.
    """
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
    except ValueError:  # not all of one shape
        array = np.array(None)
    if array.dtype.kind not in "biuf":
        raise TypeError(
            f"info={{{key!r}: {value!r}}}: give a value for steps without it: a number, a boolean or an array of them;"
            " what the environment has within a dictionary, a wrapper can put beside it"
        )
    return array.astype(np.float32) if array.dtype == np.float64 else array
