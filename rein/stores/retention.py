"""Which checkpoints stay, by what is said about them."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

Order = tuple[int, int]  # finished iterations and epochs: how far a run was


class Rules(NamedTuple):
    """Which checkpoints are kept: a file goes when no rule keeps it. The newest without NaN or infinity stays."""

    last: int | None = None  # the newest so many; None keeps all
    every: int | None = None  # those after each so many epochs
    best: tuple[str, Literal["min", "max"]] | None = None  # the best one by that metric, kept apart


class Kept(NamedTuple):
    """A checkpoint that is there."""

    order: Order
    path: Path
    about: dict[str, Any]


def superfluous(there: Sequence[Kept], rules: Rules) -> list[Kept]:
    """Those that no rule keeps."""
    if rules.last is None:
        return []
    newest_first = sorted(there, reverse=True, key=lambda kept: kept.order)
    stay = {kept.path for kept in newest_first[: rules.last]}
    stay |= {kept.path for kept in [kept for kept in newest_first if kept.about.get("finite")][:1]}
    if rules.every:
        stay |= {kept.path for kept in newest_first if _ends_multiple(kept.about, rules.every)}
    return [kept for kept in newest_first if kept.path not in stay]


def order(about: dict[str, Any] | None) -> Order:
    """That of a file; one that is too damaged to say is looked at first, so as to be reported."""
    try:
        return int((about or {})["total_iterations"]), int((about or {})["epochs_ended"])
    except (KeyError, TypeError, ValueError):
        return sys.maxsize, sys.maxsize


def value_of(about: dict[str, Any], metric: str) -> float:
    """That of a metric where a checkpoint was taken; NaN without."""
    value = about.get("metrics", {}).get(metric)
    return float(value) if isinstance(value, int | float) else math.nan


def _ends_multiple(about: dict[str, Any], every: int) -> bool:
    return not about.get("epoch_open") and about.get("epochs_ended", 1) % every == 0
