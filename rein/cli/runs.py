"""`rein runs`: list the runs in a folder."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.table import Table

from rein.cli.options import arguments_of
from rein.cli.output import say
from rein.cli.run_folder import plain
from rein.files import absolute
from rein.store.runs import RunSummary, differing, list_runs

_SHOWN = 5  # options in the table
_WIDTH = 200  # characters of a text from a file


def main(arguments: Sequence[str]) -> None:
    """Run `rein runs [FOLDER]`."""
    _options(**arguments_of(_options, "rein runs", arguments))


def _options(folder: Annotated[Path, tyro.conf.Positional] = Path("runs")) -> None:
    """List the runs in a folder with their status, return, env steps and duration, and the options that differ.

    Args:
        folder: folder that contains the folders of runs.
    """
    runs = list_runs(folder)
    if not runs:
        say(f"{folder}: no runs")
        return
    differ = differing(runs)
    say(_table(runs, absolute(folder), differ[:_SHOWN]))
    say()
    for run in runs:
        if run.note:
            say(f"{_name(run, absolute(folder))}: {_shortened(run.note)}")
    counts = Counter(run.status for run in runs)
    totals = ", ".join(f"{count} {status}" for status, count in counts.items())
    say(f"{len(runs)} run{'s' * (len(runs) > 1)}: {totals}")
    if len(differ) > _SHOWN:
        say(f"other options that differ: {_shortened(', '.join(differ[_SHOWN:]))}")


def _table(runs: Sequence[RunSummary], folder: Path, options: Sequence[str]) -> Table:
    named = len({run.name for run in runs if run.status != "damaged"}) > 1
    evaluated = any("evaluation_return" in run.metrics for run in runs)
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("run", no_wrap=True)
    table.add_column("status", no_wrap=True)
    for name in ["return", *["evaluation"] * evaluated, "env steps", "time"]:
        table.add_column(name, justify="right", no_wrap=True)
    for name in [*["recipe or agent"] * named, *(_title(option) for option in options)]:
        table.add_column(plain(name), overflow="fold", min_width=max(map(len, name.split())))
    for run in runs:
        scores = [run.mean_return, *[run.metrics.get("evaluation_return", math.nan)] * evaluated]
        known = run.status != "damaged"
        counts = [f"{run.env_steps:,}", _duration(run.seconds)] if known else ["-", "-"]
        values = [_value(run.options[option]) if option in run.options else "-" for option in options]
        cells = [plain(_shortened(cell)) for cell in (*[run.name or "-"] * named, *values)]
        numbers = ["-" if math.isnan(score) else f"{score:.5g}" for score in scores]
        table.add_row(plain(_name(run, folder)), run.status, *numbers, *counts, *cells)
    return table


def _name(run: RunSummary, folder: Path) -> str:
    return run.path.name if run.path == folder else str(run.path.relative_to(folder))


def _title(option: str) -> str:
    return option.removeprefix("agent.").replace("_", " ")


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _shortened(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _WIDTH else f"{text[: _WIDTH - 3]}..."


def _duration(seconds: float) -> str:
    """Return seconds as `12 s`, `3m 05s` or `1h 02m`."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{whole} s"
    minutes, rest = divmod(whole, 60)
    return f"{minutes}m {rest:02d}s" if minutes < 60 else f"{minutes // 60:,}h {minutes % 60:02d}m"
