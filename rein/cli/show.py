"""`rein show`: what is in a run's folder, or in one of its files, and how to look at it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.markup import escape
from rich.table import Table
from rich.tree import Tree

from rein.cli.output import printable, say
from rein.files import inside
from rein.store.folder import TRAJECTORIES, list_files
from rein.store.metrics import EPOCHS
from rein.store.reader import Run, open_run
from rein.store.selection import kept_by, parts_of

_LAST = 100
_VIEWERS = (
    ("VS Code", "the extension H5Web, then click the file"),
    ("a browser", "drop the file on myhdf5.hdfgroup.org; nothing is uploaded"),
    ("JupyterLab", "pip install jupyterlab-h5web"),
    ("the desktop", "pip install 'silx[full]', then silx view FILE"),
    ("a terminal", "pip install h5glance, then h5glance FILE"),
)


def main(arguments: Sequence[str]) -> None:
    """The command `rein show PATH`."""
    usage = "rein show PATH: the folder of a run, or one of its files"
    if "-h" in arguments or "--help" in arguments:
        say(f"usage: {usage}")
    elif len(arguments) != 1 or arguments[0].startswith("-"):
        raise ValueError(usage)
    else:
        show(arguments[0])


def show(path: str | Path) -> None:
    """Print a summary of a run's folder or of one trajectory file. Raises StoreError if there is none, or it is bad."""
    if keeps_none(path := Path(path)):
        say(_tree(path))
        comes = {"store", "rows"} <= parts_of(path).keys() and kept_by(path)[0]  # rows are what a store is given
        what = "no file of trajectories is finished yet" if comes else "no trajectories are kept"
        drawn = "; `rein plot` draws the metrics" if (path / EPOCHS).is_file() else ""
        say(f"\n{what}{'; no epoch has ended yet' if awaits_epoch(path) else drawn}", markup=True)
        return
    run = open_run(path)
    parts = [
        _tree(run.path),
        _numbers(run),
        _fields(run),
    ]  # before anything is printed: a bad file is one line, the error
    for part in parts:
        say(part)
        say()
    say(f"Any of these opens [bold]{plain(run.files[-1])}[/bold] with a plot:", markup=True)
    viewers = Table.grid(padding=(0, 2))
    for where, how in _VIEWERS:
        viewers.add_row(f"  {where}", escape(how))
    say(viewers)


def keeps_none(path: Path) -> bool:
    """Whether that is the folder of a run in which there are no trajectories, or none yet."""
    return (path / "run.json").is_file() and not list_files(inside(path, TRAJECTORIES))


def awaits_epoch(path: Path) -> bool:
    """Whether that is the folder of a run that takes down its epochs, and of which none has ended yet."""
    return keeps_none(path) and "metrics_files" in parts_of(path) and not (path / EPOCHS).is_file()


def _tree(path: Path) -> Tree:
    """What lies in the folder, with sizes; of many files of one kind the first and the last."""
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
    """Epochs, steps, episodes and returns."""
    epochs, episodes = run.epochs, run.episodes
    number, rows = epochs["number"], int(epochs["length"].sum())
    table = Table.grid(padding=(0, 2))
    halted = int((epochs["status"] == "halted").sum())
    table.add_row("epochs", f"{len(number):,} ({number[0]} to {number[-1]}), {halted:,} of them halted")
    num_envs = next((shape[1] for _, shape in run.fields.values()), 0)
    table.add_row("steps", f"{rows:,} of {num_envs:,} environments, {rows * num_envs:,} in all")
    returns, length = episodes["return"], episodes["length"]
    table.add_row("episodes", f"{len(returns):,}, {int(episodes['truncated'].sum()):,} of them truncated")
    if len(returns):
        table.add_row("return", _statistics(returns))
        if len(returns) > _LAST:
            table.add_row(f"  of the last {_LAST}", _statistics(returns[-_LAST:]))
        table.add_row("length", _statistics(length))
    for name, column in epochs["metrics"].items():
        known = np.flatnonzero(~np.isnan(column))
        ends = (f"{column[k]:.6g} in epoch {number[k]}" for k in dict.fromkeys((*known[:1], *known[-1:])))
        table.add_row(plain(name), ", ".join(ends) or "never a number")
    return table


def _fields(run: Run) -> Table:
    table = Table("field", "type", "steps, environments, ...", box=None, pad_edge=False, header_style="bold")
    for path, (dtype, shape) in run.fields.items():
        table.add_row(plain(path), str(dtype), " x ".join(f"{length:,}" for length in shape))
    return table


def _statistics(values: np.ndarray) -> str:
    with np.errstate(all="ignore"):  # a sum that overflows is infinite, and no line of its own
        mean = values.mean()
    return f"mean {mean:.6g}, from {values.min():.6g} to {values.max():.6g}"


def plain(text: str | Path) -> str:
    """Text from a disk, which must neither be read as markup nor steer the terminal."""
    return escape(printable(text))


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            break
        count /= 1000
    return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
