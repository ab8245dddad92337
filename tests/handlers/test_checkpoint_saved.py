"""The event that fires when a checkpoint is safe on the disk."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import torch

import rein
from rein.store.checkpoint_file import read_checkpoint


def make(folder: Path, **options: Any) -> tuple[rein.Loop, rein.Checkpoints]:
    """Return a loop of six epochs with two iterations each."""
    loop, checkpoints = rein.Loop(lambda state: None, epochs=6, iterations=2), rein.Checkpoints(folder)
    loop.own("generator", torch.Generator())
    rein.checkpoint(loop, checkpoints, **options)
    return loop, checkpoints


def stem(state: rein.State) -> str:
    assert state.saved_checkpoint is not None
    return state.saved_checkpoint.stem


def test_event_has_the_path_of_each_complete_file_and_fires_on_the_training_thread(tmp_path: Path) -> None:
    loop, _ = make(tmp_path, keep_last=None)
    seen: list[Any] = []

    @loop.checkpoint_saved
    def look(state: rein.State) -> None:
        assert state.saved_checkpoint is not None
        read_checkpoint(state.saved_checkpoint)
        seen.append((state.saved_checkpoint, threading.current_thread() is threading.main_thread()))

    state = loop.run()
    assert seen == [(tmp_path / f"epoch-{epoch:06d}.h5", True) for epoch in range(1, 7)]
    assert state.saved_checkpoint is None


def test_event_fires_at_the_edge_after_the_iteration_in_which_the_file_was_finished(tmp_path: Path) -> None:
    loop, checkpoints = make(tmp_path, every=2, keep_last=None)
    loop.iteration_started(lambda state: checkpoints.flush())  # the iteration waits for the file
    seen: list[Any] = []
    loop.iteration_completed(lambda state: seen.append(state.total_iterations))
    loop.checkpoint_saved(lambda state: seen.append(stem(state)))
    loop.run()
    assert seen == [*range(1, 6), "epoch-000002", *range(6, 10), "epoch-000004", *range(10, 13), "epoch-000006"]


def test_failed_writes_have_no_event(tmp_path: Path) -> None:
    loop, _ = make(tmp_path, every=2, on_failure="warn")
    folder = tmp_path / "epoch-000006.h5"  # in the place of the last file
    loop.epoch_started(once=6)(lambda state: folder.mkdir())
    seen: list[str] = []
    loop.checkpoint_saved(lambda state: seen.append(stem(state)))
    loop.run()
    assert seen == ["epoch-000002", "epoch-000004"]


def test_removed_files_have_no_event(tmp_path: Path) -> None:
    loop, checkpoints = make(tmp_path, every=2, keep_last=None)
    seen: list[str] = []
    loop.checkpoint_saved(lambda state: seen.append(stem(state)))

    @loop.iteration_started(once=5)
    def remove(state: rein.State) -> None:
        checkpoints.flush()
        (tmp_path / "epoch-000002.h5").unlink()

    loop.run()
    assert seen == ["epoch-000004", "epoch-000006"]


def test_each_checkpoint_of_two_handlers_fires_the_event_once(tmp_path: Path) -> None:
    loop, checkpoints = make(tmp_path, every=2, keep_last=None)
    rein.checkpoint(loop, checkpoints, every=3, keep_last=None)
    seen: list[str] = []
    loop.checkpoint_saved(lambda state: seen.append(stem(state)))
    loop.run()
    assert sorted(seen) == [f"epoch-{epoch:06d}" for epoch in (2, 3, 4, 6)]
