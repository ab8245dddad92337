"""`rein compact`: copy a run to a folder with fewer, larger trajectory files."""

from __future__ import annotations

from collections.abc import Sequence

from rein.cli.output import say
from rein.store.compact import compact

_USAGE = """\
rein compact RUN NEW: copy the folder of a run to the new folder NEW, with trajectory files of up to 64 MiB and 1,000
epochs. NEW contains the same data, can be resumed in place of RUN, and is compared with it. RUN is not changed"""


def main(arguments: Sequence[str]) -> None:
    """The command `rein compact RUN NEW`."""
    if "-h" in arguments or "--help" in arguments:
        say(f"usage: {_USAGE}")
        return
    if len(arguments) != 2 or any(word.startswith("-") for word in arguments):
        raise ValueError("rein compact RUN NEW: give the folder of a run and the path of a new folder")
    run, new = arguments
    done = compact(run, new)
    say(f"trajectories: {_said(done.files_before, done.bytes_before)}, now {_said(done.files, done.bytes)}")


def _said(count: int, size: int) -> str:
    return f"{count:,} file{'s' * (count != 1)} of {size / 1e6:.1f} MB"
