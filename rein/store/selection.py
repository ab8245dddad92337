"""Which epochs a store keeps: every so many, or the best ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from rein.files import read_json
from rein.types import Trajectory

Best = tuple[int, str, Literal["min", "max"]]  # how many, by which metric


class Selection:
    """Takes epochs one after the other; with `best`, an epoch may displace one that was taken before."""

    def __init__(self, every: int = 1, best: Best | None = None) -> None:
        """Raises ValueError for numbers that make no sense."""
        if type(every) is not int or every < 0:
            raise ValueError(f"every={every}: give 1 for all epochs, more to keep each so many, or 0 for none")
        if best is not None and not _makes_sense(best):
            raise ValueError(f'keep_best={best!r}: give how many, a metric, and "min" or "max": (5, "return", "max")')
        self.every, self.best = every, None if best is None else (best[0], best[1], best[2])
        self.scores: dict[int, float] = {}  # epoch -> the metric, of the best ones
        self._refused: set[str] = set()  # metrics of epochs that did not have the one that is asked for

    def wants(self, trajectory: Trajectory) -> bool:
        """Whether that epoch is to be kept. One whose metric is missing or NaN is not among the best."""
        if not self.every or trajectory.epoch % self.every:
            return False
        if self.best is None:
            return True
        score = self._score(trajectory.metrics)
        if self.best[1] not in trajectory.metrics:
            self._refused |= trajectory.metrics.keys()
        return not math.isnan(score) and (len(self.scores) < self.best[0] or score > min(self._signed().values()))

    def enter(self, trajectory: Trajectory) -> list[int]:
        """Count that epoch as kept; returns those which it displaces. Of equal ones, those that came first stay."""
        if self.best is None:
            return []
        self.scores[trajectory.epoch] = float(trajectory.metrics[self.best[1]])
        signed = self._signed()
        displaced = sorted(signed, key=lambda epoch: (-signed[epoch], epoch))[self.best[0] :]
        for epoch in displaced:
            del self.scores[epoch]
        return displaced

    @property
    def warning(self) -> str | None:
        """What to tell when it is over: that no epoch had the metric by which the best are chosen."""
        if self.best is None or self.scores or not self._refused:
            return None
        return (
            f"keep_best={self.best!r}: no epoch had that metric, and none was kept; there are {sorted(self._refused)}"
        )

    def state(self) -> list[Any] | None:
        """What `load` takes: by which metric, and the best ones so far."""
        return None if self.best is None else [*self.best[1:], [[epoch, score] for epoch, score in self.scores.items()]]

    def load(self, state: Any, is_there: Callable[[int], bool]) -> None:
        """Take over the best ones so far, of those that are there; none where they were chosen otherwise."""
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
    """`every` and `keep_best` of the store of the run in that folder, as its `run.json` says; 1 and None if not."""
    store = parts_of(run).get("store")
    config = store.get("config") if isinstance(store, dict) else None
    if not isinstance(config, dict):
        return 1, None
    every = config.get("every", 1)
    return every if type(every) is int and every >= 0 else 1, config.get("keep_best")


def parts_of(run: Path) -> dict[str, Any]:
    """The parts of the run in that folder, as its `run.json` says; none where it does not."""
    try:
        parts = read_json(run / "run.json")["parts"]
    except (OSError, ValueError, KeyError):
        return {}
    return parts if isinstance(parts, dict) else {}


def _makes_sense(best: Any) -> bool:
    if not isinstance(best, list | tuple) or len(best) != 3:
        return False
    count, metric, mode = best
    return type(count) is int and count > 0 and isinstance(metric, str) and mode in ("min", "max")
