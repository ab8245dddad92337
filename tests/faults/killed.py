"""Train a run repeatedly, kill it at random moments, and print what it had acknowledged.

Usage: python killed.py FOLDER CASE KILLS SEED. Each attempt is a fork in a separate process group. It resumes the run
in FOLDER if it has a checkpoint. Every third kill happens inside a system call of a write, the others at random times.
Prints one line of JSON per attempt.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import runpy
import signal
import sys
import time
from pathlib import Path

import torch

import rein
from rein.store.checkpoint_file import write_checkpoint
from rein.store.checkpoint_folder import Checkpoints
from rein.store.folder import list_files
from rein.store.format import sealed
from tests.faults.broken_os import BrokenOs, dies

TOOLS = runpy.run_path(str(Path(__file__).with_name("cases.py")))


def attempt(folder: Path, case: str, acknowledged: int, die_at: int) -> None:
    """Train to the end or until killed."""
    os.setpgid(0, 0)
    if die_at:
        sealed.os = BrokenOs(die_at, dies)  # type: ignore[assignment]  # a fake module
    loop = TOOLS["build"](case, folder)
    loop.iterations = 40  # longer than in other tests, so that kills hit a running loop
    if any((folder / "checkpoints").glob("*.h5")):
        rein.resume(loop, folder)
    checkpoints = loop.parts["store"].checkpoints

    def acknowledge(state: rein.State) -> None:
        if (folder / "checkpoints/latest").exists():
            os.write(acknowledged, state.clocks.epochs.to_bytes(4, "little"))

    @loop.epoch_ended(every=2)
    def ask(state: rein.State) -> None:
        state.request(flush)

    def flush(state: rein.State) -> None:
        checkpoints.flush()
        acknowledge(state)

    loop.epochs = 12
    loop.started.attach(lambda state: os.write(acknowledged, b"\xff\xff\xff\xff") and None)
    write_checkpoint(folder / "end.h5", TOOLS["end"](loop), {"kind": "run"})


def fork(folder: Path, case: str, die_at: int) -> tuple[int, int]:
    """Fork an attempt. Returns its pid and the descriptor from which to read its acknowledgements."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(reading)
            attempt(folder, case, writing, die_at)
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    return child, reading


def main() -> None:
    """Repeat attempts until the run is finished, and kill the first KILLS of them."""
    torch.set_num_threads(1)
    folder, case, kills, seed = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    moments, last = random.Random(seed), 0
    for number in range(10 * kills + 2):
        inside = number < kills and number % 3 == 0
        child, reading = fork(folder, case, moments.randrange(1, 40) if inside else 0)
        if number < kills and not inside:
            os.read(reading, 4)  # wait until the run has started
            time.sleep(moments.random() * 0.15)
            with contextlib.suppress(ProcessLookupError):  # the attempt has ended
                os.killpg(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
        received = b""
        while more := os.read(reading, 4096):
            received += more
        os.close(reading)
        numbers = [int.from_bytes(received[k : k + 4], "little") for k in range(0, len(received), 4)]
        last = max([last, *(n for n in numbers if n != 0xFFFFFFFF)])
        killed = os.WIFSIGNALED(status)
        temporary = [path.name for path in folder.rglob(".*.tmp-*")]
        newest = Checkpoints(folder / "checkpoints").newest()
        stored = [int(path.stem[7:13]) for path in list_files(folder / "trajectories")]
        report = {"killed": killed, "status": status, "acknowledged": last, "torn": len(temporary)}
        report |= {"saved": newest.about["epochs_ended"] if newest else 0, "stored": max(stored, default=0)}
        print(json.dumps(report), flush=True)
        if not killed:
            return


if __name__ == "__main__":
    main()
