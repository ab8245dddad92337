"""`rein compact`: the small trajectory files of a run as few large ones."""

from __future__ import annotations

from collections.abc import Sequence

from rein.cli.output import say
from rein.store.compact import compact

_USAGE = """\
rein compact RUN: join the trajectory files in the folder of a run into files of up to 64 MiB and 1,000 epochs. What is
read from them stays the same to the bit, and a run that is writing is left alone"""


def main(arguments: Sequence[str]) -> None:
    """The command `rein compact RUN`."""
    if "-h" in arguments or "--help" in arguments:
        say(f"usage: {_USAGE}")
        return
    if len(arguments) != 1 or arguments[0].startswith("-"):
        raise ValueError("rein compact RUN: give the folder of a run")
    done = compact(arguments[0])
    say(f"trajectories: {_said(done.files_before, done.bytes_before)}, now {_said(done.files, done.bytes)}")


def _said(count: int, size: int) -> str:
    return f"{count:,} file{'s' * (count != 1)} of {size / 1e6:.1f} MB"
