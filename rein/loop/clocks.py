"""Counters of a run by name. A counter held on a device is fetched when it is read."""

from __future__ import annotations

import operator
import time
from collections.abc import Mapping
from typing import Any

from torch import Tensor

CLOCKS = ("env_steps", "vector_steps", "updates", "episodes", "iterations", "epochs", "seconds")


def _counter(name: str) -> property:
    slot = f"_{name}"
    stored = operator.attrgetter(slot)

    def read(self: Clocks) -> int:
        value = stored(self)
        if type(value) is int:
            return value
        value = int(value)  # fetched from the device once, then kept
        setattr(self, slot, value)
        return value

    def write(self: Clocks, value: int | Tensor) -> None:
        setattr(self, slot, value)

    return property(read, write, doc=f"The {name} so far; may be set to an int or to a 0-d tensor, reads as an int.")


class Clocks:
    """Counters of a run, used by schedules, filters, stop rules, log lines and file names.

    Parts advance `env_steps`, `vector_steps`, `updates` and `episodes`. The loop advances `iterations`, `epochs` and
    `seconds` (running time, summed over resumes). Reading a counter that holds a tensor fetches it from its device.
    """

    __slots__ = ("_env_steps", "_episodes", "_resumed_at", "_seconds", "_state", "_updates", "_vector_steps")

    env_steps = _counter("env_steps")
    vector_steps = _counter("vector_steps")
    updates = _counter("updates")
    episodes = _counter("episodes")

    def __init__(self, state: Any) -> None:
        """Create clocks for `state`, the run's `State`, which counts iterations and epochs."""
        self._state = state
        self._env_steps: int | Tensor = 0
        self._vector_steps: int | Tensor = 0
        self._updates: int | Tensor = 0
        self._episodes: int | Tensor = 0
        self._seconds = 0.0
        self._resumed_at: float | None = None

    def advance(self, **amounts: int | Tensor) -> None:
        """Add to clocks by name. Adding a tensor does not fetch it."""
        for name, amount in amounts.items():
            if name not in CLOCKS[:4]:
                raise ValueError(
                    f"clocks.advance({name}=...): unknown clock; a part can advance {', '.join(CLOCKS[:4])}"
                )
            setattr(self, f"_{name}", getattr(self, f"_{name}") + amount)

    @property
    def iterations(self) -> int:
        """Finished iterations of the whole run."""
        return self._state._total_iterations

    @property
    def epochs(self) -> int:
        """Finished epochs of the whole run, including halted ones."""
        return self._state._epochs_ended

    @property
    def seconds(self) -> float:
        """Wall-clock seconds that the loop has been running, summed over resumes."""
        running = 0.0 if self._resumed_at is None else time.perf_counter() - self._resumed_at
        return self._seconds + running

    def start(self) -> None:
        """Resume counting `seconds` at the start of a run."""
        self._resumed_at = time.perf_counter()

    def stop(self) -> None:
        """Stop counting `seconds` at the end of a run."""
        self._seconds, self._resumed_at = self.seconds, None

    def as_dict(self) -> dict[str, float]:
        """Return all clocks by name."""
        return {name: getattr(self, name) for name in CLOCKS}

    def state_dict(self) -> dict[str, Any]:
        """Return the clocks as numbers, without `iterations` and `epochs`, which are in the state of the loop."""
        return {name: getattr(self, name) for name in (*CLOCKS[:4], "seconds")}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the clocks from the result of `state_dict`."""
        for name in CLOCKS[:4]:
            setattr(self, f"_{name}", int(state[name]))
        self._seconds = float(state["seconds"])

    def __repr__(self) -> str:
        return f"Clocks({', '.join(f'{name}={value}' for name, value in self.as_dict().items())})"
