"""Rules of retention: which checkpoints stay, judged by their descriptions."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

Order = tuple[int, int]  # finished iterations and epochs: how far a run was
Best = tuple[str, Literal["min", "max"]]  # a metric, and whether its smallest or largest value is best


class Rules(NamedTuple):
    """Rules of one handler. A file stays if any rule of any handler keeps it, or if it is the newest finite one."""

    last: int | None = None  # the newest so many; None keeps all
    every: int | None = None  # those after each so many epochs
    best: Best | None = None  # the best one by that metric, kept in a folder of its own


class Kept(NamedTuple):
    """A checkpoint that is there."""

    order: Order
    path: Path
    about: dict[str, Any]


def superfluous(there: Sequence[Kept], rules: Sequence[Rules]) -> list[Kept]:
    """Return the checkpoints that no rule keeps."""
    if any(one.last is None for one in rules):
        return []
    newest_first = sorted(there, reverse=True, key=lambda kept: kept.order)
    stay = {kept.path for kept in newest_first[: max(one.last or 0 for one in rules)]}
    stay |= {kept.path for kept in [kept for kept in newest_first if kept.about.get("finite")][:1]}
    for every in {one.every for one in rules if one.every}:
        stay |= {kept.path for kept in newest_first if _ends_multiple(kept.about, every)}
    return [kept for kept in newest_first if kept.path not in stay]


def is_own(path: Path, about: Mapping[str, Any]) -> bool:
    """Return whether rein wrote this file under this name. Only such files are ever removed."""
    return about.get("file") == path.name


def metrics_of(path: Path, about: Mapping[str, Any]) -> list[Best]:
    """Return the metrics for which rein keeps a file among the best; none for a file of the user's."""
    listed = about.get("best")
    if not is_own(path, about) or not isinstance(listed, list):
        return []
    pairs = [tuple(one) for one in listed if isinstance(one, list) and len(one) == 2]
    return [(str(metric), mode) for metric, mode in pairs if mode in ("min", "max")]


def holders(there: Mapping[Path, Mapping[str, Any]]) -> dict[Best, Path]:
    """Return the file that holds the best value of each metric for which files are kept; of equal ones the first."""
    found: dict[Best, Path] = {}
    for path, about in sorted(there.items(), key=lambda item: order(item[1])):
        for best in metrics_of(path, about):
            if best not in found or beats(about, there[found[best]], best):
                found[best] = path
    return found


def beats(about: Mapping[str, Any], other: Mapping[str, Any], best: Best) -> bool:
    """Return whether one checkpoint is better than another one by a metric. A NaN is never better."""
    value, before = value_of(about, best[0]), value_of(other, best[0])
    return not math.isnan(value) and (math.isnan(before) or (value > before if best[1] == "max" else value < before))


def order(about: Mapping[str, Any] | None) -> Order:
    """Return how far the run was. A damaged file comes last, so that it is reported; a part of `rein.save` first."""
    if about is not None and about.get("kind") == "part":
        return -1, -1
    try:
        return int((about or {})["total_iterations"]), int((about or {})["epochs_ended"])
    except (KeyError, TypeError, ValueError):
        return sys.maxsize, sys.maxsize


def value_of(about: Mapping[str, Any], metric: str) -> float:
    """Return the value of a metric when a checkpoint was taken; NaN without."""
    metrics = about.get("metrics")
    value = metrics.get(metric) if isinstance(metrics, dict) else None
    return float(value) if isinstance(value, int | float) else math.nan


def _ends_multiple(about: dict[str, Any], every: int) -> bool:
    return not about.get("epoch_open") and about.get("epochs_ended", 1) % every == 0
