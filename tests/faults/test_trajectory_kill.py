"""A busy writer is killed at random moments: nothing that was acknowledged is lost, nothing half-written has a name."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rein
from rein.errors import StoreError
from rein.ops.random import stream_seed
from rein.store.folder import list_files
from rein.store.format.sealed import verify
from rein.store.hdf5 import HDF5Store
from rein.store.verify import verify_run
from rein.testing.store import assert_equal, make_trajectory, with_fields

WRITER = Path(__file__).with_name("killed_writer.py")
TOOLS = runpy.run_path(str(WRITER))

PAGE = 4096


def attempts(folder: Path, kills: int, inside: int) -> list[dict[str, Any]]:
    arguments = [folder, kills, inside, stream_seed(0, "kill")]
    done = subprocess.run([sys.executable, WRITER, *map(str, arguments)], capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_writer_that_is_killed_loses_nothing_it_has_acknowledged(
    tmp_path: Path, scale: Callable[[int, int], int]
) -> None:
    kills, inside, runs, torn, lost = scale(200, 3), scale(40, 3), 0, 0, 0
    said = attempts(tmp_path, kills, inside)
    assert len(said) == kills + inside
    for number, one in enumerate(said):
        assert one["status"] == 9, one  # killed, and not by itself
        assert one["left"] == [], "the start before has not cleaned up"
        assert len(one["torn"]) <= 1 and all(name.endswith(f".tmp-{one['pid']}") for name in one["torn"])
        torn += len(one["torn"])
        after = said[number + 1] if number + 1 < len(said) and said[number + 1]["run"] == one["run"] else None
        if after is not None:  # what the next life found
            lost += max(0, one["acknowledged"] - after["last"])
            continue
        lost += max(0, one["acknowledged"] - check(tmp_path / str(one["run"])))
        runs += 1
    assert lost == 0 and torn >= max(1, len(said) // 10)
    print(
        f"kill -9 of a writer of trajectories: {len(said)} kills, {torn} with a file half written, all of them removed;"
        f" {lost} acknowledged epochs lost, {runs} of {runs} runs whole"
    )


def check(path: Path) -> int:
    """A folder that was left by a kill: every file whole, every epoch as it was given; its last epoch."""
    finished = list_files(path / "trajectories")
    for file in finished:
        verify(file)
    if not finished:
        return 0
    run = rein.open_run(path)
    last = int(run.epochs["number"][-1])
    assert run.epochs["number"].tolist() == list(range(1, last + 1))
    for kept in run:
        assert_equal([kept], [TOOLS["make"](kept.epoch)])
    store = HDF5Store(path, exist="resume")
    assert sorted((path / "trajectories").iterdir()) == sorted(finished), "a leftover was not removed"
    store.load_state_dict({"epoch": last})  # the first parts of an epoch, whose others were never written, go aside
    store.close()
    assert [file.name for file in list_files(path / "trajectories")] == [file.name for file in run.files]
    return last


def torn(whole: bytes, at: int) -> list[bytes]:
    """The file cut there, zeros from there on, and zeros in that page alone."""
    zeros = bytes(len(whole[at : at + PAGE]))
    made = [whole[:at], whole[:at].ljust(len(whole), b"\0"), whole[:at] + zeros + whole[at + PAGE :]]
    return [content for content in made if content != whole]


def test_a_torn_write_is_found_wherever_the_file_was_cut(tmp_path: Path, scale: Callable[[int, int], int]) -> None:
    """What a loss of power can leave under a final name: found before anything is parsed, and named."""
    steps, num_envs = scale(400, 30), 8
    noise = torch.from_numpy(np.random.default_rng(0).standard_normal((steps, num_envs, 50), np.float32))
    given = [with_fields(make_trajectory(n, steps=steps, num_envs=num_envs), noise=noise) for n in (1, 2, 3)]
    store = HDF5Store(tmp_path / "run", max_epochs=1)
    for trajectory in given:
        store.append(trajectory)
    store.close()
    *others, last = list_files(store.path / "trajectories")
    whole, found = last.read_bytes(), 0
    assert len(whole) >= scale(1 << 20, 1 << 16)
    for at in range(0, len(whole), PAGE):
        for content in torn(whole, at):
            last.write_bytes(content)
            for ask in (verify, lambda path: rein.open_run(path).epochs, lambda _: rein.open_run(store.path).epochs):
                with pytest.raises(StoreError, match=rf"{last.name}: (is damaged|was cut|has no user block)"):
                    ask(last)
            found += 1
    broken = [path for path, reason in verify_run(store.path).problems if "SHA-256" in reason]
    assert broken == [last]  # cut nowhere, and zeros in its last page alone
    for path, trajectory in zip(others, given, strict=False):  # each file is a run by itself
        assert_equal(list(rein.open_run(path)), [trajectory])
    last.rename(tmp_path / last.name)
    assert_equal(list(rein.open_run(store.path)), given[:2])
    print(f"torn writes: a file of {len(whole):,} bytes torn at every 4 KiB, {found} of {found} found and named")
