"""Read mutants of trajectory files in every possible way, and print one line of JSON per mutant.

Usage: python fuzzed.py FOLDER FIRST STOP SEED. Makes the mutants FIRST to STOP (`mutants.py`) and reads them in forks,
one fork per batch, so that a mutant that kills its fork is identified.
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
from rein.cli.run_folder import show, verify_files
from rein.errors import StoreError
from rein.ops.random import stream_seed

TOOLS = runpy.run_path(str(Path(__file__).with_name("mutants.py")))
AT_ONCE = 25  # mutants per fork
MEMORY = 1 << 30  # bytes in addition to those in use at the start
SECONDS = 30  # time limit per mutant


def read_all(path: Path) -> None:
    """Read all tables and fields, and some epochs, episodes, transitions and sequences."""
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
    """Run `rein show`."""
    show(path)


def verified(path: Path) -> None:
    """Run `rein verify`, which must end with status 1 if it finds a problem."""
    try:
        verify_files(path)
    except SystemExit as end:
        if end.code != 1:
            raise AssertionError(f"rein verify ended with status {end.code}") from end
        raise StoreError(f"{path}: is reported by rein verify") from end


def outcome(call: Callable[[Path], None], path: Path) -> tuple[str, str]:
    """Return `read`, `refused` or the kind of failure, and its text."""
    try:
        with contextlib.redirect_stdout(io.StringIO()) as output:
            call(path)
    except StoreError as error:
        text = str(error)
        if str(path) not in text:
            return "a StoreError that does not name the file", text
        return ("refused", text) if "\n" not in text else ("a StoreError of several lines", text)
    except BaseException:  # any other error is a failure
        return "another error", traceback.format_exc()
    text = output.getvalue()
    return ("read", "") if "\x1b[2J" not in text else ("output with terminal escapes", text)


def look_at(run: Path) -> dict[str, Any]:
    """Read, show and verify a run of one mutant. Returns the outcomes and the longest processor time."""
    report: dict[str, Any] = {"seconds": 0.0}
    for name, call in (("read", read_all), ("show", shown), ("verify", verified)):
        begin = seconds()
        report[name] = outcome(call, run)
        report["seconds"] = max(report["seconds"], seconds() - begin)
    return report


def seconds() -> float:
    """Return the processor time of this process, which does not depend on the load of the machine."""
    return sum(os.times()[:2])


def peak() -> int:
    """Return the peak memory of this process in bytes, in addition to that at its start."""
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - START) << 10


def batch(numbers: range, folder: Path, bases: list[bytes], seed: int, writing: int) -> None:
    """Make and check these mutants. Each is announced first, so that a mutant that kills the fork is known."""
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
        report = look_at(run)
        signal.alarm(0)
        os.write(writing, json.dumps({"number": number, "kind": kind, "bytes": peak(), **report}).encode() + b"\n")
        shutil.rmtree(run)


def forked(numbers: range, folder: Path, bases: list[bytes], seed: int) -> Iterator[dict[str, Any]]:
    """Check these mutants in a fork and yield the reports. If a fork dies, another one continues after that mutant."""
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
    """Run all batches in order."""
    torch.set_num_threads(1)
    folder, begin, stop, seed = Path(sys.argv[1]), *map(int, sys.argv[2:])
    bases = TOOLS["make_bases"](folder)
    for first in range(begin, stop, AT_ONCE):
        for report in forked(range(first, min(first + AT_ONCE, stop)), folder, bases, seed):
            print(json.dumps(report), flush=True)


LINUX = sys.platform == "linux"
START = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

if __name__ == "__main__":
    main()
