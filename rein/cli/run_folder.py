"""`rein runs`, `show`, `view`, `verify` and `compact`: inspect or copy the folders of runs."""

from __future__ import annotations

import importlib.util
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from json import dumps as encode_json
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro
from rich.markup import escape
from rich.table import Table
from rich.tree import Tree

from rein.cli.terminal import printable, say, shown_width
from rein.errors import StoreError
from rein.files import absolute, followed, inside
from rein.store.compact import compact
from rein.store.folder import TRAJECTORIES, kept_by, list_files, parts_of
from rein.store.format.sealed import verify
from rein.store.metrics_files import EPOCHS, PLOT, awaits_epoch, keeps_none
from rein.store.reader import Run, open_run
from rein.store.runs import RunList, differing, list_runs
from rein.store.verify import verify_run

_WIDTH = 200  # characters of a text from a file
_NAMED = 4  # runs with the same reason
_LAST = 100  # episodes in the statistics of the last returns
_VIEW_USAGE = """\
usage: rein view PATH [options]

Open the folder of a run, or one of its files, in JupyterLab. Double-click a
file to plot it with H5Web. Options are passed to jupyter lab, for example
--no-browser and --port=8889."""
_MODULES = ("jupyterlab", "jupyterlab_h5web")


def show(path: Annotated[Path, tyro.conf.Positional]) -> None:
    """Summarize the folder of a run, or one of its files.

    Args:
        path: folder of the run, or one of its files.
    """
    if keeps_none(path):
        say(_tree(path))
        stores = {"store", "rows"} <= parts_of(path).keys() and kept_by(path)[0]  # only rows are written to a store
        text = "no trajectory file is finished yet" if stores else "no trajectories are stored"
        hint = "; plot the metrics with `rein plot`" if (path / EPOCHS).is_file() else ""
        say(f"\n{text}{'; no epoch has ended yet' if awaits_epoch(path) else hint}", markup=True)
        return
    run = open_run(path)
    for part in [_tree(run.path), _numbers(run), _fields(run)]:  # read everything before printing
        say(part)
        say()
    say(how_to_open(run.files[-1]))


def _tree(path: Path) -> Tree:
    """Return the files of the folder with their sizes. A subfolder of more than four lists its first and last."""
    if path.is_file():
        return Tree(_labelled(path))
    tree = Tree(f"[bold]{plain(path)}[/bold]")
    for entry in sorted(path.iterdir()):
        if entry.name.startswith("."):
            continue
        if not entry.is_dir():
            tree.add(_labelled(entry))
            continue
        files = [] if entry.is_symlink() else sorted(file for file in entry.rglob("*") if not file.is_dir())
        count = f"{len(files)} file{'s' * (len(files) != 1)}, {_size(sum(f.lstat().st_size for f in files))}"
        branch = tree.add(f"{plain(entry.name)}/  {count}")
        for file in files if len(files) <= 4 else (files[0], None, files[-1]):
            branch.add("..." if file is None else _labelled(file, str(file.relative_to(entry))))
    return tree


def _labelled(file: Path, name: str | None = None) -> str:
    return f"{plain(name or file.name)}  {_size(file.lstat().st_size)}"


def _numbers(run: Run) -> Table:
    """Return a table of epochs, steps, episodes, returns and metrics."""
    epochs, episodes = run.epochs, run.episodes
    number = epochs["number"]
    steps = int(epochs["length"].sum())
    table = Table.grid(padding=(0, 2))
    halted = int((epochs["status"] == "halted").sum())
    table.add_row("epochs", f"{len(number):,} ({number[0]} to {number[-1]}), {halted:,} of them halted")
    num_envs = next((shape[1] for _, shape in run.fields.values()), 0)
    table.add_row("steps", f"{steps:,} in {num_envs:,} environments, {steps * num_envs:,} in total")
    returns, length = episodes["return"], episodes["length"]
    table.add_row("episodes", f"{len(returns):,}, {int(episodes['truncated'].sum()):,} of them truncated")
    if len(returns):
        table.add_row("return", _statistics(returns))
        if len(returns) > _LAST:
            table.add_row(f"  of the last {_LAST}", _statistics(returns[-_LAST:]))
        table.add_row("length", _statistics(length))
    for name, column in epochs["metrics"].items():
        rows = np.flatnonzero(~np.isnan(column))
        by_value = rows[column[rows].argsort(kind="stable")]
        ends = {"first": rows[:1], "last": rows[-1:], "minimum": by_value[:1], "maximum": by_value[-1:]}
        parts = (f"{word} {column[i]:.6g} in epoch {number[i]}" for word, at in ends.items() for i in at)
        table.add_row(plain(name), ", ".join(parts) or "always NaN")
    return table


def _fields(run: Run) -> Table:
    table = Table("field", "type", "steps, environments, ...", box=None, pad_edge=False, header_style="bold")
    for path, (dtype, shape) in run.fields.items():
        table.add_row(plain(path), str(dtype), " x ".join(f"{length:,}" for length in shape))
    return table


def _statistics(values: np.ndarray) -> str:
    with np.errstate(all="ignore"):  # no warning if a sum overflows
        mean = values.mean()
    return f"mean {mean:.6g}, from {values.min():.6g} to {values.max():.6g}"


def plain(text: str | Path) -> str:
    """Return text from a file without markup and control characters."""
    return escape(printable(text))


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            break
        count /= 1000
    return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"


def view_command(arguments: Sequence[str]) -> None:
    """Run `rein view PATH`."""
    if not arguments or arguments[0].startswith("-"):
        if {"-h", "--help"} & set(arguments):
            say(_VIEW_USAGE)
            return
        raise ValueError("rein view PATH: give the folder of a run, or one of its files")
    path = absolute(arguments[0])
    file = first_file(path)
    verify(file)  # a damaged file can crash the viewer
    if any(importlib.util.find_spec(name) is None for name in _MODULES):
        say(how_to_open(file))
        return
    folder = path if path.is_dir() else path.parent
    say(f"double-click {file.relative_to(folder)} in the file list on the left; stop with Ctrl-C")
    # H5Web opens only files selected in that list, not URLs
    # -P: a file in the working directory must not replace a module
    command = [sys.executable, "-P", "-m", "jupyterlab", f"--ServerApp.root_dir={folder.resolve()}", *arguments[1:]]
    if status := subprocess.run(command, check=False).returncode:
        raise SystemExit(status)


def first_file(path: Path) -> Path:
    """Return the file to open first: the learning curves of a run, or its newest trajectories.

    Raises StoreError if the folder has neither.
    """
    if path.is_file():
        return followed(path)
    files = [path / PLOT] if (path / PLOT).is_file() else list_files(inside(path, TRAJECTORIES))[-1:]
    if not files:
        raise StoreError(f"{path}: no HDF5 file there; give the folder of a run, or one of its files")
    return files[0]


def how_to_open(file: Path) -> str:
    """Return instructions for viewers that open a file with a plot."""
    word = shlex.quote(str(file))
    return f"""\
To open files with `rein view`: pip install "jupyterlab>=4" jupyterlab-h5web
Other viewers that plot {file}:
  VS Code    install the extension H5Web and click the file
  browser    drop the file on https://myhdf5.hdfgroup.org; nothing is uploaded
  desktop    pip install "silx[full]", then: silx view {word}
  terminal   pip install h5glance, then: h5glance {word} (a tree, no plot)"""


def verify_files(path: Annotated[Path, tyro.conf.Positional]) -> None:
    """Check a run, or one of its files, for damage.

    Prints a line for each problem, and exits with status 1 if there are any.

    Args:
        path: folder of the run, or one of its files.
    """
    report = verify_run(path)
    for file, reason in report.problems:
        say(printable(f"{file}: {reason}"))  # on one line
    checked = f"{report.files:,} file{'s' * (report.files != 1)} of {report.bytes / 1e6:.1f} MB"
    contents = f"{report.epochs:,} epochs and {report.episodes:,} episodes"
    bad = len({file for file, _ in report.problems})
    say(f"{checked} checked, {contents}: {f'problems in {bad:,}' if bad else 'no problems'}")
    if bad:
        raise SystemExit(1)


def compact_run(
    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")],
    new: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="NEW")],
) -> None:
    """Copy a run to a new folder, with trajectory files of up to 64 MiB and 1,000 epochs, and compare the copy with it.

    The copy can be resumed like the run, which is not changed.

    Args:
        run: folder of the run.
        new: path of the new folder.
    """
    done = compact(run, new)
    say(f"trajectories: {_files_of(done.files_before, done.bytes_before)}, now {_files_of(done.files, done.bytes)}")


def _files_of(count: int, size: int) -> str:
    return f"{count:,} file{'s' * (count != 1)} of {size / 1e6:.1f} MB"


def list_runs_in(
    folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="[FOLDER]")] = Path("runs"),
    *,
    sort: str | None = None,
    json: tyro.conf.FlagCreatePairsOff[bool] = False,
) -> None:
    """List the runs in a folder with their status, return, env steps and duration, and the options that differ.

    A terminal shows the columns that fit. In a pipe, each run is a line of values that are separated by tabs.

    Args:
        folder: folder that contains the folders of runs.
        sort: sort by a column of the table, an option or a metric, the largest first. Default: by path.
        json: print a JSON list with everything that is known about each run, including all options and last metrics.
    """
    runs = list_runs(folder)
    if sort is not None:
        runs = runs.sorted_by(sort)
    width = shown_width()
    if json:
        say(encode_json([run.record for run in runs], indent=2))
    elif not runs:
        say(f"{folder}: no runs")
    elif width is None:
        columns = [*runs.columns(differing(runs)), ("reason", [" ".join((run.note or "-").split()) for run in runs])]
        for row in zip(*((heading, *cells) for heading, cells in columns), strict=True):
            say("\t".join(map(printable, row)))
    else:
        _show_runs(runs, width)


def _show_runs(runs: RunList, width: int) -> None:
    """Print the table, the reasons and the totals."""
    (header, *lines), left_out = runs.table(differing(runs), width)
    say(f"[bold]{plain(header)}[/bold]", markup=True)
    say("\n".join(lines))
    say()
    named: dict[str, list[str]] = {}
    for run in runs:
        if run.note:
            named.setdefault(_shortened(run.note), []).append(runs.name(run))
    for reason, names in named.items():
        others = f" and {len(names) - _NAMED} others" if len(names) > _NAMED else ""
        say(printable(f"{', '.join(names[:_NAMED])}{others}: {reason}"))
    counts = Counter(run.status for run in runs)
    totals = ", ".join(f"{count} {status}" for status, count in counts.items())
    say(f"{len(runs)} run{'s' * (len(runs) > 1)}: {totals}")
    if left_out:
        say(printable(f"columns for a wider terminal: {_shortened(', '.join(left_out))}"))


def _shortened(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _WIDTH else f"{text[: _WIDTH - 3]}..."
