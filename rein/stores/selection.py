"""Which epochs a store keeps: every so many, or the best ones."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Literal

from rein.types import Trajectory

Best = tuple[int, str, Literal["min", "max"]]  # how many, by which metric


class Selection:
    """Takes epochs one after the other; with `best`, an epoch may displace one that was taken before."""

    def __init__(self, every: int = 1, best: Best | None = None) -> None:
        """Raises ValueError for numbers that make no sense."""
        if every < 0:
            raise ValueError(f"every={every}: give 1 for all epochs, more to keep each so many, or 0 for none")
        if best is not None and (len(best) != 3 or best[0] < 1 or best[2] not in ("min", "max")):
            raise ValueError(f'keep_best={best!r}: give how many, a metric, and "min" or "max": (5, "return", "max")')
        self.every, self.best = every, best
        self.scores: dict[int, float] = {}  # epoch -> the metric, of the best ones

    def wants(self, trajectory: Trajectory) -> bool:
        """Whether that epoch is to be kept. One whose metric is missing or NaN is not among the best."""
        if not self.every or trajectory.epoch % self.every:
            return False
        if self.best is None:
            return True
        score = self._score(trajectory.metrics)
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

    def load(self, scores: Iterable[tuple[int, float]]) -> None:
        """Take over the best ones so far."""
        self.scores = {int(epoch): float(score) for epoch, score in scores}

    def _score(self, metrics: Mapping[str, float]) -> float:
        assert self.best is not None
        return float(metrics.get(self.best[1], math.nan)) * self._sign

    def _signed(self) -> dict[int, float]:
        return {epoch: score * self._sign for epoch, score in self.scores.items()}

    @property
    def _sign(self) -> float:
        return 1.0 if self.best is not None and self.best[2] == "max" else -1.0
