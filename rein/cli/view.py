"""`rein view`: a run, or one of its files, in H5Web."""

from __future__ import annotations

import importlib.util
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from rein.cli.output import say
from rein.errors import StoreError
from rein.files import absolute, inside
from rein.store.folder import TRAJECTORIES, list_files
from rein.store.format.sealed import verify
from rein.store.metrics import PLOT

_USAGE = """\
rein view PATH [options]: the folder of a run, or one of its files, in JupyterLab, where H5Web draws what is
double-clicked. Options are those of jupyter lab: --no-browser, --port=8889"""
_MODULES = ("jupyterlab", "jupyterlab_h5web")


def main(arguments: Sequence[str]) -> None:
    """The command `rein view PATH`."""
    if not arguments or arguments[0].startswith("-"):
        if {"-h", "--help"} & set(arguments):
            say(f"usage: {_USAGE}")
            return
        raise ValueError("rein view PATH: give the folder of a run, or one of its files")
    path = absolute(arguments[0])
    file = first_file(path)
    verify(file)  # a damaged file can crash the viewer
    if any(importlib.util.find_spec(name) is None for name in _MODULES):
        say(how_to_open(file))
        return
    folder = path if path.is_dir() else path.parent
    say(f"double-click {file.relative_to(folder)} in the list on the left; Ctrl-C ends it")
    # H5Web opens what is selected in that list, and nothing by its URL
    # -P: a file in the working directory must not replace a module
    command = [sys.executable, "-P", "-m", "jupyterlab", f"--ServerApp.root_dir={folder.resolve()}", *arguments[1:]]
    if status := subprocess.run(command, check=False).returncode:
        raise SystemExit(status)


def first_file(path: Path) -> Path:
    """What to open first: of a run, its learning curves, or else its newest trajectories. Raises StoreError."""
    if path.is_file():
        return path.resolve() if path.is_symlink() else path
    found = [path / PLOT] if (path / PLOT).is_file() else list_files(inside(path, TRAJECTORIES))[-1:]
    if not found:
        raise StoreError(f"{path}: no HDF5 file there; give the folder of a run, or one of its files")
    return found[0]


def how_to_open(file: Path) -> str:
    """The viewers that open a file with a plot, for whoever has not got the extra."""
    word = shlex.quote(str(file))
    return f"""\
`pip install "jupyterlab>=4" jupyterlab-h5web` lets this command open it. Without, any of these opens
{file} with a plot:
  VS Code       with the extension H5Web: click the file
  a browser     drop the file on https://myhdf5.hdfgroup.org; nothing is uploaded
  the desktop   pip install "silx[full]", then: silx view {word}
  a terminal    pip install h5glance, then: h5glance {word} (a tree, no plot)"""
