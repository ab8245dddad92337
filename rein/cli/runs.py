"""`rein runs`: list the runs in a folder."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro
from rich.table import Table

from rein.cli.options import arguments_of
from rein.cli.output import say
from rein.cli.run_folder import plain
from rein.store.runs import NUMBERS, OPTIONS, RunList, differing, list_runs

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
    say(_table(runs, differ[:OPTIONS]))
    say()
    for run in runs:
        if run.note:
            say(f"{runs.name(run)}: {_shortened(run.note)}")
    counts = Counter(run.status for run in runs)
    totals = ", ".join(f"{count} {status}" for status, count in counts.items())
    say(f"{len(runs)} run{'s' * (len(runs) > 1)}: {totals}")
    if len(differ) > OPTIONS:
        say(f"other options that differ: {_shortened(', '.join(differ[OPTIONS:]))}")


def _table(runs: RunList, options: Sequence[str]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    columns = runs.columns(options)
    for name, _ in columns:
        if name in ("run", "status", *NUMBERS):
            table.add_column(name, justify="right" if name in NUMBERS else "left", no_wrap=True)
        else:
            table.add_column(plain(name), overflow="fold", min_width=max(map(len, name.split())))
    for name, *cells in zip(*(cells for _, cells in columns), strict=True):
        table.add_row(plain(name), *(plain(_shortened(cell)) for cell in cells))
    return table


def _shortened(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _WIDTH else f"{text[: _WIDTH - 3]}..."
