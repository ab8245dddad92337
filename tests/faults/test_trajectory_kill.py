"""Kill a busy writer at random moments: no acknowledged data is lost, and no incomplete file has a final name."""

from __future__ import annotations

import json
import runpy
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
from tests import programs

WRITER = Path(__file__).with_name("killed_writer.py")
TOOLS = runpy.run_path(str(WRITER))

PAGE = 4096


def attempts(folder: Path, kills: int, inside: int) -> list[dict[str, Any]]:
    done = programs.run(WRITER, folder, kills, inside, stream_seed(0, "kill"))
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_killed_writer_loses_no_acknowledged_epoch(tmp_path: Path, scale: Callable[[int, int], int]) -> None:
    kills, inside, runs, torn, lost = scale(80, 3), scale(40, 3), 0, 0, 0
    reports = attempts(tmp_path, kills, inside)
    assert len(reports) == kills + inside
    for number, one in enumerate(reports):
        assert one["status"] == 9, one  # killed, and did not end earlier
        assert one["left"] == [], "the store must remove temporary files of dead processes"
        assert len(one["torn"]) <= 1 and all(name.endswith(f".tmp-{one['pid']}") for name in one["torn"])
        torn += len(one["torn"])
        after = reports[number + 1] if number + 1 < len(reports) and reports[number + 1]["run"] == one["run"] else None
        if after is not None:  # the next writer of the run
            lost += max(0, one["acknowledged"] - after["last"])
            continue
        lost += max(0, one["acknowledged"] - check(tmp_path / str(one["run"])))
        runs += 1
    assert lost == 0 and torn >= max(1, len(reports) // 10)
    print(
        f"kill -9 of a writer of trajectories: {len(reports)} kills, {torn} with an incomplete file, which was removed;"
        f" {lost} acknowledged epochs lost, {runs} of {runs} runs complete"
    )


def check(path: Path) -> int:
    """Check a folder after a kill: every file is complete and every epoch correct. Returns the last epoch."""
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
    assert sorted((path / "trajectories").iterdir()) == sorted(finished), "a temporary file was not removed"
    store.load_state_dict({"epoch": last})  # moves the parts of an incomplete epoch aside
    store.close()
    assert [file.name for file in list_files(path / "trajectories")] == [file.name for file in run.files]
    return last


def torn(whole: bytes, at: int) -> list[bytes]:
    """Return the file truncated at `at`, with zeros from there on, and with zeros only in that page."""
    zeros = bytes(len(whole[at : at + PAGE]))
    made = [whole[:at], whole[:at].ljust(len(whole), b"\0"), whole[:at] + zeros + whole[at + PAGE :]]
    return [content for content in made if content != whole]


def test_torn_write_is_detected_at_every_page(tmp_path: Path, scale: Callable[[int, int], int]) -> None:
    """A loss of power may leave such files under a final name. They are detected before parsing."""
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
            for read in (verify, lambda path: rein.open_run(path).epochs, lambda _: rein.open_run(store.path).epochs):
                with pytest.raises(StoreError, match=rf"{last.name}: (is damaged|was truncated|has no user block)"):
                    read(last)
            found += 1
    broken = [path for path, reason in verify_run(store.path).problems if "SHA-256" in reason]
    assert broken == [last]  # the last mutant has zeros in its last page
    for path, trajectory in zip(others, given, strict=False):  # each file opens as a run
        assert_equal(list(rein.open_run(path)), [trajectory])
    last.rename(tmp_path / last.name)
    assert_equal(list(rein.open_run(store.path)), given[:2])
    print(f"torn writes: a file of {len(whole):,} bytes torn at every 4 KiB, {found} of {found} detected")
