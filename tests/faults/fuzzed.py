"""Reads mutants of trajectory files in every way there is, and says of each how that went.

usage: python fuzzed.py FOLDER FIRST STOP SEED: makes the mutants of these numbers (`mutants.py`) and reads them in
forks, a batch each, so that a file of which a fork dies is named. One line of JSON a file.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import resource
import runpy
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import rein
from rein.cli.run_folder import show_command, verify_command
from rein.errors import StoreError
from rein.ops.random import stream_seed

TOOLS = runpy.run_path(str(Path(__file__).with_name("mutants.py")))
AT_ONCE = 25  # mutants of a fork
MEMORY = 1 << 30  # bytes beyond what the process had
SECONDS = 30  # a fork that has been at one file for so long is ended


def read_all(path: Path) -> None:
    """Every table, field, epoch and episode, transitions and sequences."""
    run = rein.open_run(path)
    _ = repr(run), run.info, run.epochs, run.episodes
    for name in run.fields:
        np.array(run.field(name))
    for number in run.epochs["number"][:5].tolist():
        run.trajectory(number)
    ids = run.episodes["id"][:5].tolist()
    for chosen in (None, ids):
        for dataset in (run.transitions(episodes=chosen), run.sequences(2, episodes=chosen)):
            size = len(dataset)
            _ = dataset[:16], dataset[max(0, size - 16) :]
    for id in ids:
        run.episode(id)


def shown(path: Path) -> None:
    """`rein show`."""
    show_command([str(path)])


def verified(path: Path) -> None:
    """`rein verify`, which ends with status 1 where something is wrong."""
    try:
        verify_command([str(path)])
    except SystemExit as end:
        if end.code != 1:
            raise AssertionError(f"rein verify ended with status {end.code}") from end
        raise StoreError(f"{path}: is told by rein verify") from end


def outcome(call: Callable[[Path], None], path: Path) -> tuple[str, str]:
    """`read` or `refused`, or what should not be; and the text of it."""
    try:
        with contextlib.redirect_stdout(io.StringIO()) as said:
            call(path)
    except StoreError as error:
        text = str(error)
        if str(path) not in text:
            return "a StoreError that does not name the file", text
        return ("refused", text) if "\n" not in text else ("a StoreError of several lines", text)
    except BaseException:  # whatever it is, it is what is looked for
        return "another error", traceback.format_exc()
    return ("read", "") if "\x1b[2J" not in said.getvalue() else ("output that steers the terminal", said.getvalue())


def look_at(run: Path) -> dict[str, Any]:
    """How reading, showing and verifying a run of one mutant went, in what time and memory."""
    said: dict[str, Any] = {"seconds": 0.0}
    for name, call in (("read", read_all), ("show", shown), ("verify", verified)):
        begin = seconds()
        said[name] = outcome(call, run)
        said["seconds"] = max(said["seconds"], seconds() - begin)
    return said


def seconds() -> float:
    """Return the processor time of this process: others may be busy, too."""
    return sum(os.times()[:2])


def peak() -> int:
    """Return the largest number of bytes that this process has had, beyond those at its start."""
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - START) << 10


def batch(numbers: range, folder: Path, bases: list[bytes], seed: int, writing: int) -> None:
    """Make and look at these mutants; say of each first that it begins."""
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() if LINUX else 0
    if LINUX:
        resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY, taken + MEMORY))
    for number in numbers:
        draw = random.Random(stream_seed(seed, "mutant", number))
        run = folder / str(number)
        (run / "trajectories").mkdir(parents=True, exist_ok=True)
        kind = TOOLS["make_mutant"](number, draw, bases, run / "trajectories" / TOOLS["NAME"])
        os.write(writing, json.dumps({"number": number, "kind": kind}).encode() + b"\n")
        signal.alarm(SECONDS)
        said = look_at(run)
        signal.alarm(0)
        os.write(writing, json.dumps({"number": number, "kind": kind, "bytes": peak(), **said}).encode() + b"\n")
        shutil.rmtree(run)


def forked(numbers: range, folder: Path, bases: list[bytes], seed: int) -> Iterator[dict[str, Any]]:
    """What a fork says of these mutants; where it dies, another one goes on behind the file that did it."""
    while numbers:
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            status = 1
            try:
                batch(numbers, folder, bases, seed, writing)
                status = 0
            finally:
                os._exit(status)
        os.close(writing)
        begun: dict[str, Any] = {"number": numbers[0] - 1}
        with os.fdopen(reading) as lines:
            for line in lines:
                begun = json.loads(line)
                if "read" in begun:
                    yield begun
        status = os.waitpid(child, 0)[1]
        if status == 0:
            return
        died = begun["number"] + ("kind" not in begun or "read" in begun)
        yield begun | {"number": died, "died": status}
        numbers = range(died + 1, numbers.stop)


def main() -> None:
    """All batches, one after the other."""
    torch.set_num_threads(1)
    folder, begin, stop, seed = Path(sys.argv[1]), *map(int, sys.argv[2:])
    bases = TOOLS["make_bases"](folder)
    for first in range(begin, stop, AT_ONCE):
        for said in forked(range(first, min(first + AT_ONCE, stop)), folder, bases, seed):
            print(json.dumps(said), flush=True)


LINUX = sys.platform == "linux"
START = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

if __name__ == "__main__":
    main()
