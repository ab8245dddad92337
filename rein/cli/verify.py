"""`rein verify`: whether a run, or one of its files, is whole."""

from __future__ import annotations

from collections.abc import Sequence

from rein.cli.output import printable, say
from rein.store.verify import verify_run

_USAGE = """\
rein verify PATH: the folder of a run, or one of its files. Prints a line for each thing that is wrong, and ends with
status 1 if there is any"""


def main(arguments: Sequence[str]) -> None:
    """The command `rein verify PATH`."""
    if "-h" in arguments or "--help" in arguments:
        say(f"usage: {_USAGE}")
        return
    if len(arguments) != 1 or arguments[0].startswith("-"):
        raise ValueError("rein verify PATH: give the folder of a run, or one of its files")
    report = verify_run(arguments[0])
    for path, reason in report.problems:
        say(printable(f"{path}: {reason}"))  # on one line
    checked = f"{report.files:,} file{'s' * (report.files != 1)} of {report.bytes / 1e6:.1f} MB"
    held = f"{report.epochs:,} epochs and {report.episodes:,} episodes"
    bad = len({path for path, _ in report.problems})
    say(f"{checked} checked, {held}: {f'something is wrong with {bad:,}' if bad else 'all is well'}")
    if bad:
        raise SystemExit(1)
