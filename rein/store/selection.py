"""Choose the epochs that a store keeps: every n-th epoch, or the best ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from rein.files import read_json
from rein.types import Trajectory

Best = tuple[int, str, Literal["min", "max"]]  # number of epochs, metric, mode


class Selection:
    """Decides for each epoch in turn whether it is kept. With `best`, an epoch may replace an earlier one."""

    def __init__(self, every: int = 1, best: Best | None = None) -> None:
        """Raises ValueError for invalid arguments."""
        if type(every) is not int or every < 0:
            raise ValueError(f"every={every}: must be 1 to keep all epochs, n to keep every n-th epoch, or 0 for none")
        if best is not None and not _is_valid(best):
            raise ValueError(
                f'keep_best={best!r}: must be (number, metric, "min" or "max"), as (5, "episode_return", "max")'
            )
        self.every, self.best = every, None if best is None else (best[0], best[1], best[2])
        self.scores: dict[int, float] = {}  # epoch -> metric, of the best epochs
        self._kept = False  # whether an epoch was kept; not used with `best`

    def wants(self, trajectory: Trajectory) -> bool:
        """Return whether to keep an epoch. With `best`, an epoch whose metric is missing or NaN is not kept."""
        if not self.every or trajectory.epoch % self.every:
            return False
        if self.best is None:
            return True
        score = self._score(trajectory.metrics)
        return not math.isnan(score) and (len(self.scores) < self.best[0] or score > min(self._signed().values()))

    def enter(self, trajectory: Trajectory) -> list[int]:
        """Record an epoch as kept. Returns the epochs that it replaces. On ties, the oldest epoch is kept."""
        if self.best is None:
            self._kept = True
            return []
        self.scores[trajectory.epoch] = float(trajectory.metrics[self.best[1]])
        signed = self._signed()
        displaced = sorted(signed, key=lambda epoch: (-signed[epoch], epoch))[self.best[0] :]
        for epoch in displaced:
            del self.scores[epoch]
        return displaced

    @property
    def awaits_first(self) -> bool:
        """Whether some epochs are to be kept and none was so far."""
        return self.every > 0 and not (self._kept if self.best is None else self.scores)

    def __repr__(self) -> str:
        return f"every={self.every}" if self.best is None else f"keep_best={self.best!r}"

    def state(self) -> list[Any] | None:
        """Return the metric and the best epochs so far, for `load`."""
        return None if self.best is None else [*self.best[1:], [[epoch, score] for epoch, score in self.scores.items()]]

    def load(self, epoch: int, state: Any, is_there: Callable[[int], bool]) -> None:
        """Continue after `epoch` with the best epochs so far, without missing ones.

        Loads none if `state` has another metric or mode.
        """
        self._kept = 0 < self.every <= epoch
        if self.best is not None:
            metric, mode, scores = state or (None, None, ())
            same = (metric, mode) == self.best[1:]
            self.scores = {int(epoch): float(score) for epoch, score in scores if same and is_there(int(epoch))}

    def _score(self, metrics: Mapping[str, float]) -> float:
        assert self.best is not None
        return float(metrics.get(self.best[1], math.nan)) * self._sign

    def _signed(self) -> dict[int, float]:
        return {epoch: score * self._sign for epoch, score in self.scores.items()}

    @property
    def _sign(self) -> float:
        return 1.0 if self.best is not None and self.best[2] == "max" else -1.0


def kept_by(run: Path) -> tuple[int, Any]:
    """Return `every` and `keep_best` of the store that wrote that run, from `run.json`. By default 1 and None."""
    store = parts_of(run).get("store")
    config = store.get("config") if isinstance(store, dict) else None
    if not isinstance(config, dict):
        return 1, None
    every = config.get("every", 1)
    return every if type(every) is int and every >= 0 else 1, config.get("keep_best")


def parts_of(run: Path) -> dict[str, Any]:
    """Return the parts of a run from its `run.json`, or an empty dictionary if it has none."""
    try:
        parts = read_json(run / "run.json")["parts"]
    except (OSError, ValueError, KeyError):
        return {}
    return parts if isinstance(parts, dict) else {}


def _is_valid(best: Any) -> bool:
    if not isinstance(best, list | tuple) or len(best) != 3:
        return False
    count, metric, mode = best
    return type(count) is int and count > 0 and isinstance(metric, str) and mode in ("min", "max")
