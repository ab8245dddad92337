"""Inputs of episodes besides their seeds: reset options, and the actions of open episodes, which a resumed run repeats.

Shapes: N environments, R stepped environments, C allocated steps, T steps of one episode.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from rein.errors import EnvironmentContractError
from rein.ops.trees import map_tree
from rein.spaces import map_space
from rein.spaces.conversion import layout
from rein.types import Tree

logger = logging.getLogger(__name__)

Options = Mapping[str, Any]

_FIRST = 64  # initially allocated steps of actions; doubled when used up


class ResetOptions:
    """Options that `reset` of each environment gets: a dictionary of JSON values, or None."""

    def __init__(self, num_envs: int) -> None:
        self._next: list[dict[str, Any] | None] = [None] * num_envs
        self._current: list[dict[str, Any] | None] = [None] * num_envs
        self._used = False  # whether any options were set

    @property
    def current(self) -> list[dict[str, Any] | None] | None:
        """Copies of the options of the current episodes; None if no options were ever set."""
        return _copy(self._current) if self._used else None

    def set(self, options: Options | Sequence[Options | None] | None, environments: Iterable[int] | None) -> None:
        """Set the options of the next episodes. Raises TypeError or ValueError for invalid options."""
        count = len(self._next)
        rows = list(range(count)) if environments is None else [int(index) for index in environments]
        if wrong := [row for row in rows if not 0 <= row < count]:
            raise ValueError(f"set_options(environments=...): got {wrong[0]}, but there are {count} environments")
        each = [options] * len(rows) if options is None or isinstance(options, Mapping) else list(options)
        if len(each) != len(rows):
            raise ValueError(f"set_options: got {len(each)} dictionaries of options for {len(rows)} environments")
        for row, values in zip(rows, [_dictionary(x) for x in each], strict=True):
            self._next[row] = values
        self._used = True

    def begin(self, environment: int) -> dict[str, Any] | None:
        """Make the next options of one environment the current ones. Returns a copy."""
        self._current[environment] = self._next[environment]
        return self.of(environment)

    def override(self, options: Sequence[Options | None]) -> None:
        """Make these options the current ones, and also the next ones if no options were ever set."""
        self._current = [_dictionary(x) for x in options]
        if not self._used:  # episodes that begin during a replay may need options, too
            self._next, self._used = list(self._current), True

    def of(self, environment: int) -> dict[str, Any] | None:
        """Return a copy of the current options of one environment."""
        return _copy(self._current[environment])

    def record(self, environment: int, options: dict[str, Any] | None) -> None:
        """Set the current options of one environment, whose episode was begun elsewhere."""
        self._current[environment] = options

    def next_of(self, environment: int) -> dict[str, Any] | None:
        """Return the options of the next episode of one environment."""
        return self._next[environment]

    def part(self, rows: range) -> dict[str, Any]:
        """Return the `state_dict` of some environments."""
        each = [options[rows.start : rows.stop] for options in (self._next, self._current)]
        return {"json": json.dumps(each) if self._used else None}

    def state_dict(self) -> dict[str, Any]:
        """Return the options as JSON text; None if no options were ever set."""
        return {"json": json.dumps([self._next, self._current]) if self._used else None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of `state_dict`."""
        count, text = len(self._next), state["json"]
        self._used = text is not None
        self._next, self._current = ([None] * count, [None] * count) if text is None else json.loads(text)


def as_keywords(options: Options | None) -> dict[str, Any]:
    """Return the keyword argument `options` of `reset`, if there are options."""
    return {} if options is None else {"options": options}


def _dictionary(options: Any) -> dict[str, Any] | None:
    if options is not None and not isinstance(options, Mapping):
        raise TypeError(f"reset options must be a dictionary or None, got {options!r:.80}")
    return None if options is None else _json(options, "options")


def _copy(value: Any) -> Any:
    """Return a copy of JSON values, faster than `copy.deepcopy`."""
    if isinstance(value, dict):
        return {key: _copy(part) for key, part in value.items()}
    return [_copy(part) for part in value] if isinstance(value, list) else value


def _json(value: Any, path: str) -> Any:
    """Return a copy that JSON restores exactly: tuples and arrays become lists, NumPy numbers become Python numbers."""
    value = value.tolist() if isinstance(value, np.ndarray | np.generic) else value
    if isinstance(value, Mapping):
        if wrong := [key for key in value if not isinstance(key, str)]:
            raise TypeError(f"{path}: the keys of reset options must be strings, got {wrong[0]!r:.80}")
        return {key: _json(part, f"{path}[{key!r}]") for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_json(part, f"{path}[{index}]") for index, part in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{path}: reset options must be finite, got {value}")
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(
        f"{path}: reset options are stored as JSON; give numbers, strings, lists and dictionaries, got {value!r:.80}"
    )


class ActionHistory:
    """Actions of the open episode of each environment in one array `(N, C, *A)`, which grows up to C = `max_steps`.

    The actions of episodes longer than `max_steps` are not kept; only their steps are counted. The first such episode
    is logged as a warning that begins with `name`. With `max_steps=0` nothing is kept or logged.
    """

    def __init__(self, name: str, space: spaces.Space[Any], num_envs: int, max_steps: int) -> None:
        self._name, self._space, self._max_steps = name, space, max_steps
        self._steps_N, self._all_rows_N = np.zeros(num_envs, np.int64), np.arange(num_envs)
        self._bound = 0  # upper bound of the steps of all episodes
        self._logged = max_steps == 0
        self._allocated = min(_FIRST, max_steps)
        self._actions = zeros(space, (num_envs, self._allocated))

    def steps(self, index: int) -> int:
        """Number of steps of the open episode of one environment."""
        return int(self._steps_N[index])

    def clear(self, index: int) -> None:
        """Discard the actions of one environment, because its next episode begins."""
        self._steps_N[index] = 0

    def append(self, action: Tree, rows: Sequence[int]) -> None:
        """Append `action`, `(R, *A)`, to the environments in `rows` (R,). A range has all environments."""
        if isinstance(rows, range):
            row_R, step_R = self._all_rows_N, self._steps_N.copy()
            self._steps_N += 1
        else:
            row_R = np.asarray(rows)
            step_R = self._steps_N[row_R]
            self._steps_N[row_R] += 1
        fits_R = None  # all
        self._bound += 1
        if self._bound > self._allocated:
            self._make_room(int(self._steps_N.max()))
            fits_R = step_R < self._allocated
            row_R, step_R = row_R[fits_R], step_R[fits_R]
        if isinstance(action, Tensor):
            _write(self._actions, row_R, step_R, action, fits_R)
        else:
            map_tree(lambda stored, new: _write(stored, row_R, step_R, new, fits_R), self._actions, action)

    def restore(self, index: int, actions: Tree, steps: int) -> None:
        """Set the actions `(T, *A)` of the open episode of one environment."""
        self._make_room(max(steps, self._bound))
        count = min(steps, self._allocated)
        map_tree(lambda stored, taken: _put(stored[index, :count], taken[:count]), self._actions, actions)
        self._steps_N[index] = steps

    def state_dict(self) -> dict[str, Any]:
        """Return the actions `(T, *A)` and the number of steps T of each environment; -1 if actions were not kept."""
        counts = [steps if steps <= self._allocated else -1 for steps in self._steps_N.tolist()]
        return {
            "actions": [
                map_tree(lambda x, i=i, t=t: torch.from_numpy(x[i, : max(t, 0)].copy()), self._actions)
                for i, t in enumerate(counts)
            ],
            "steps": torch.tensor(counts, dtype=torch.int64, device="cpu"),
        }

    def _make_room(self, steps: int) -> None:
        """Allocate memory for episodes of `steps` steps, up to `max_steps`."""
        self._bound = steps
        if steps > self._max_steps and not self._logged:
            self._logged = True
            logger.warning(
                "%s: an episode has more than max_replay_steps=%d steps; a run that is resumed within it begins new"
                " episodes. Give a larger max_replay_steps to keep the actions of longer episodes",
                self._name,
                self._max_steps,
            )
        size = min(max(2 * self._allocated, steps), self._max_steps)
        if steps > self._allocated and size > self._allocated:
            larger = zeros(self._space, (len(self._steps_N), size))
            map_tree(lambda new, old: _put(new[:, : old.shape[1]], old), larger, self._actions)
            self._actions, self._allocated = larger, size


def put_actions(stored: Tree, rows: slice | np.ndarray[Any, Any], action: Tree, field: str = "action") -> None:
    """Copy actions `(R, *A)` to rows of arrays (N, *A). Raises EnvironmentContractError for another shape."""
    if isinstance(stored, Mapping):
        for key, part in stored.items():
            put_actions(part, rows, action[key], f"{field}.{key}")
        return
    shape = stored[rows].shape
    if action.shape != shape:
        raise EnvironmentContractError(f"{field}: expected a tensor of shape {shape}, got {tuple(action.shape)}")
    stored[rows] = _numpy(action)


def _numpy(action: Tensor) -> np.ndarray[Any, Any]:
    if action.dtype is torch.int64 and action.is_cpu:
        return action.numpy()
    if not action.dtype.is_floating_point or action.dtype is torch.float32:
        return action.numpy(force=True)
    return action.float().numpy(force=True)  # numpy has no bfloat16


def _write(stored: np.ndarray[Any, Any], row_R: Any, step_R: Any, action: Tensor, fits_R: Any) -> None:
    new_RA = _numpy(action)
    stored[row_R, step_R] = new_RA if fits_R is None else new_RA[fits_R]


def _put(place: np.ndarray[Any, Any], values: Any) -> None:
    place[...] = values


def zeros(space: spaces.Space[Any], lead: tuple[int, ...]) -> Tree:
    """Return arrays `(*lead, ...)` of zeros with the structure of the space."""
    return map_space(lambda part: np.zeros((*lead, *layout(part)[0]), layout(part)[1]), space)
