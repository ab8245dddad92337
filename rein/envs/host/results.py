"""Checks of what simulators return from `reset` and `step`.

Shapes: R rows.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rein.errors import EnvironmentContractError
from rein.spaces.conversion import column

RESET = ("observation", "info")
STEP = ("observation", "reward", "terminated", "truncated", "info")
_BOOL, _FLOAT = np.dtype(np.bool_), np.dtype(np.float32)


def check_parts(who: str, method: str, result: Any, parts: tuple[str, ...]) -> None:
    """Raise EnvironmentContractError unless `result`, returned by `method` of `who`, has these parts."""
    if not isinstance(result, tuple | list) or len(result) != len(parts):
        wanted, got = ", ".join(parts), reprlib.repr(result)
        raise EnvironmentContractError(f"{who}: expected ({wanted}) from {method}, got {got}")


def missing_values(info: Mapping[str, Any] | None) -> dict[str, np.ndarray[Any, Any]]:
    """Return the default values of the option `info` as arrays; float64 becomes float32.

    Raises TypeError unless `info` is None or a dictionary of numbers, booleans or arrays of these.
    """
    if info is None:
        return {}
    if not isinstance(info, Mapping):
        raise TypeError(f"info={info!r}: give a dictionary of names and default values, such as {{'success': False}}")
    return {key: _missing_value(key, value) for key, value in info.items()}


def rewards_of(values: Sequence[Any], rows: Sequence[Any]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return R rewards as a new array. `rows` has the rows for error messages.

    Raises EnvironmentContractError for a reward that is not a number.
    """
    return column("reward", values, _FLOAT, rows=rows)


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
