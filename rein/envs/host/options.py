"""Reset options of N environments, for curricula: those of the current episodes, and those of the next ones."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

Options = Mapping[str, Any]


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
