"""Text output of handlers: lines, tables and groups of metrics."""

from __future__ import annotations

import hashlib
import math
import shutil
import sys
from collections.abc import Callable, Mapping
from typing import TextIO

from rein.loop.state import INTERRUPT, State

UNSOLVED = "unsolved/"  # prefix of keys in `state.memory` for targets of `record_solved` that are not met yet
GROUPS = ("train", "evaluation", "loss", "norm", "time")  # in the order of tables
_FIRST = ("episode_", "world_", "return_")  # of the group "train"
_RESOURCES = ("cpu_cores", "memory_gb", "gpu_memory_gb")


def write_line(text: str, file: TextIO | None = None) -> Exception | None:
    """Write a line to `file` (default: standard output). Return the error if it cannot be written, otherwise None.

    Characters that the encoding of the file lacks are escaped.
    """
    file = sys.stdout if file is None else file
    try:
        try:
            print(text, file=file, flush=True)
        except UnicodeEncodeError as error:
            print(text.encode(error.encoding, "backslashreplace").decode(error.encoding), file=file, flush=True)
    except Exception as error:  # a file object may raise anything
        return error
    return None


def in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook."""
    return "ipykernel" in sys.modules and sys.modules["IPython"].get_ipython() is not None


def grouped(metric: str) -> str:
    """Return the name of a metric with its group: `loss/policy` for `policy_loss`, `train/episode_return`, ...

    A name that contains "/" has a group already. Empty parts between slashes are removed.
    """
    metric = "/".join(filter(None, metric.split("/"))) or "_"
    if "/" in metric:
        return metric
    if metric.removeprefix("evaluation_") not in (metric, ""):
        return f"evaluation/{metric.removeprefix('evaluation_')}"
    for group in ("loss", "norm"):
        if metric == group or metric.removesuffix(f"_{group}") not in (metric, ""):
            return f"{group}/{metric.removesuffix(f'_{group}')}"
    is_time = metric.endswith("_per_second") or metric.startswith("seconds_") or metric in _RESOURCES
    return f"time/{metric}" if is_time else f"train/{metric}"


class Names:
    """Names of metrics in a service that does not accept all names. Different metrics have different names."""

    def __init__(self, rename: Callable[[str], str], longest: int = 1000) -> None:
        """`rename` returns a name that the service accepts. `longest` is the maximum number of characters."""
        self._rename, self._longest = rename, longest
        self._names: dict[str, str] = {}  # by metric

    def __getitem__(self, metric: str) -> str:
        if metric not in self._names:
            name = self._rename(metric)[: self._longest]
            if name in self._names.values():  # the end depends on the metric only, so that resumed runs agree
                end = f"-{hashlib.sha256(metric.encode()).hexdigest()[:8]}"
                name = name[: self._longest - len(end)] + end
            self._names[metric] = name
        return self._names[metric]


def rate(count: float, seconds: float) -> float:
    """Return the count per second, NaN for a time of zero: clocks have a limited resolution."""
    return count / seconds if seconds > 0 else math.nan


def table(title: str, metrics: Mapping[str, float], width: int) -> str:
    """Return the title, and below it names and values for each group of metrics, in as many columns as fit.

    NaN is left out.
    """
    groups: dict[str, list[tuple[str, str]]] = {group: [] for group in GROUPS}
    for metric, value in metrics.items():
        group, _, name = grouped(metric).partition("/")
        if not math.isnan(value):
            groups.setdefault(group, []).append((name.replace("_per_second", "/s"), short_number(value)))
    groups = {group: cells for group, cells in groups.items() if cells}
    if not groups:
        return title
    groups.get("train", []).sort(key=lambda cell: not cell[0].startswith(_FIRST))
    label, columns, sizes = max(map(len, groups)) + 2, 1, [(0, 0)]
    for columns in range(max(map(len, groups.values())), 0, -1):  # the largest number that fits, or 1
        pairs = [[pair for cells in groups.values() for pair in cells[n::columns]] for n in range(columns)]
        sizes = [(max(len(name) for name, _ in pair), max(len(value) for _, value in pair)) for pair in pairs]
        if 2 + label + sum(name + value + 5 for name, value in sizes) - 3 <= width:
            break
    lines = [title]
    for group, cells in groups.items():
        for first in range(0, len(cells), columns):
            row = zip(cells[first : first + columns], sizes, strict=False)  # the last row may be shorter
            texts = [f"{name:<{names}}  {value:>{values}}" for (name, value), (names, values) in row]
            lines.append(f"  {'' if first else group:<{label}}{'   '.join(texts)}".rstrip())
    return "\n".join(lines)


def width_of(file: TextIO | None) -> int:
    """Return the width of the terminal that `file` (default: standard output) is, or 80 for another file."""
    file = sys.stdout if file is None else file
    is_terminal = file is not None and file.isatty()
    return shutil.get_terminal_size((80, 24)).columns if is_terminal else 80


def short_number(value: float) -> str:
    """Format whole numbers in full, and others with four digits, or five from 1,000."""
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.5g}" if abs(value) >= 1000 else f"{value:.4g}"


def duration(seconds: float) -> str:
    """Format seconds as `0:18`, `2:05:00` or `7 d 00:00:00`."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 24:
        return f"{hours // 24} d {hours % 24:02}:{minutes:02}:{seconds:02}"
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def status_of(state: State) -> str:
    """Return the status of a run that ended: "completed" if it was halted because a clock reached its limit."""
    at_limit = any(getattr(state.clocks, clock) >= limit for clock, limit in state.limits.items())
    halted = state.status == "halted" and INTERRUPT not in state.halts
    return "completed" if halted and at_limit else str(state.status)


def ending(state: State) -> str:
    """Return how a run ended: `completed after 0:12: not solved`."""
    reasons = dict.fromkeys(text for text in (state.reason, verdict(state)) if text)
    return f"{status_of(state)} after {duration(state.clocks.seconds)}" + f": {', '.join(reasons)}" * bool(reasons)


def verdict(state: State) -> str | None:
    """Return "solved" or "not solved" if the run has a target, see `rein.record_solved`; otherwise None."""
    if "solved" in state.memory:
        return "solved"
    return "not solved" if any(key.startswith(UNSOLVED) for key in state.memory) else None
