"""Send signals to runs of the command line at random moments, resume them, and print one line of JSON per run.

Usage: python signalled.py FOLDER KIND COUNT SEED. KIND is the name of a signal, or TWICE for two SIGINT. Each run is a
fork. Every fifth run has a terminal.
"""

from __future__ import annotations

import json
import os
import pty
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

import rein.cli.train
from rein.cli import main

# evaluate and save often, so that some signals arrive during an evaluation or a save
TRAIN = ["train", "gridworld", "--epochs", "24", "--num-envs", "32", "--no-stop-when-solved"]
TRAIN += ["--evaluate-every", "2", "--checkpoint-every", "3"]


def fork(words: list[str], output: Path, terminal: bool) -> list[int]:
    """Fork a process that runs the command line. Its output, or the text on its terminal, goes to a file.

    Returns its pid, and that of the process that copies the text on the terminal.
    """
    if terminal:
        child, leader = pty.fork()
        if child:
            reader = os.fork()
            if reader == 0:
                _copy(leader, output)
            os.close(leader)
            return [child, reader]
    else:
        child = os.fork()
        if child:
            return [child]
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT, 0o666)
        for standard in (1, 2):
            os.dup2(descriptor, standard)
    status = 1
    try:
        main(words)
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else 1
    finally:
        sys.stdout.flush()
        os._exit(status)


def _copy(leader: int, output: Path) -> None:
    with open(output, "wb") as file:
        try:
            while data := os.read(leader, 4096):
                file.write(data)
        except OSError:  # the other end is closed
            file.flush()
    os._exit(0)


def begin(folder: Path, terminal: bool) -> list[int]:
    """Start a run and wait until it writes. Returns its pids."""
    started = fork([*TRAIN, "--run", str(folder / "run")], folder / "output", terminal)
    while not (folder / "run/run.json").exists():
        time.sleep(0.002)
    return started


def ended(pids: list[int]) -> int:
    """Wait until the processes have ended. Returns the exit status of the first."""
    statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    return statuses[0]


def undisturbed(folder: Path) -> float:
    """Return the seconds from the first file of a run to its end, without signals."""
    folder.mkdir(parents=True)
    started, began = begin(folder, False), time.monotonic()
    assert ended(started) == 0
    return time.monotonic() - began


def once(folder: Path, kind: str, draw: random.Random, terminal: bool, span: float) -> dict[str, Any]:
    """Run once and send the signals, the first within `span` seconds. Returns the result of the run."""
    run, output = folder / "run", folder / "output"
    child, *reader = begin(folder, terminal)
    time.sleep(draw.random() * span)
    number = signal.SIGINT if kind == "TWICE" else getattr(signal, kind)
    os.kill(child, number)
    if kind == "TWICE":
        time.sleep(draw.random() * 0.02)
        os.kill(child, number)  # the pid is still valid, since the child was not waited for
    began = time.monotonic()
    status = ended([child])
    seconds = time.monotonic() - began
    for pid in reader:
        ended([pid])
    text = output.read_text(errors="replace")
    resumed = 0
    if status:
        again = fork(["resume", str(run), "--quiet"], folder / "again", False)
        resumed = ended(again)
    return {"status": status, "seconds": seconds, "text": text, "resumed": resumed, "terminal": terminal}


def everything() -> None:
    """Run all runs of a kind. COUNT 0 runs one without signals."""
    torch.set_num_threads(1)
    folder, kind, count, draw = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), random.Random(int(sys.argv[4]))
    assert rein.cli.train is not None  # imported before the first fork
    if count == 0:
        folder.mkdir(parents=True)
        sys.exit(ended(fork([*TRAIN, "--run", str(folder / "run"), "--quiet"], folder / "output", False)))
    span = 0.7 * undisturbed(folder / "undisturbed")  # the next run may be faster
    for number in range(count):
        place = folder / str(number)
        place.mkdir(parents=True)
        print(json.dumps(once(place, kind, draw, number % 5 == 0, span)), flush=True)


if __name__ == "__main__":
    everything()
