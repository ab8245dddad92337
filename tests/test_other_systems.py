"""Fallbacks for functions that only Linux has. Locks: tests/store/test_folder.py."""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import rein
from rein.accelerate import fast_learner
from rein.accelerate.products import wide_amd
from rein.cli import END_WITH_PARENT, jobs, train
from rein.envs.cartpole import CartPole
from rein.envs.host import processes, worker
from rein.episodes import evaluation_process
from rein.handlers.interrupts import interrupts
from rein.handlers.watchdog import resident_bytes
from rein.replay import storage
from rein.store.format import sealed, trajectory_reader

ONLY_POSIX = ("SIGHUP", "SIGXCPU", "SIGUSR1", "SIGUSR2", "SIGKILL")


def missing(*arguments: Any, **options: Any) -> Any:
    raise FileNotFoundError("/proc")


def test_cores_are_counted_without_affinity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert jobs.cores() == os.cpu_count()


@pytest.mark.parametrize("library", [None, SimpleNamespace()], ids=["macOS", "musl"])
def test_memory_settings_need_glibc(monkeypatch: pytest.MonkeyPatch, library: Any) -> None:
    if library is None:
        monkeypatch.setattr(sys, "platform", "darwin")
        monkeypatch.setattr(ctypes, "CDLL", missing)
    else:
        monkeypatch.setattr(ctypes, "CDLL", lambda name: library)
    fast_learner.keep_freed_memory()


def test_signals_of_windows_end_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ONLY_POSIX:
        monkeypatch.delattr(signal, name, raising=False)
    environment = CartPole(num_envs=2, seed=0)
    loop = rein.training_loop(rein.PPO(environment, hidden=(8,), rollout_steps=8, seed=0), environment, iterations=8)
    caught = interrupts(loop, SimpleNamespace(ask=lambda: None))
    loop.epoch_ended(once=1)(lambda state: signal.raise_signal(signal.SIGTERM))
    with train._exit_on_signals(), jobs._collect_signals():
        assert loop.run(epochs=5).epoch == 1
    assert caught.signal == signal.SIGTERM


def test_mapped_replay_needs_neither_statvfs_nor_fallocate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=1 << 30))
    monkeypatch.delattr(os, "statvfs", raising=False)
    monkeypatch.delattr(os, "posix_fallocate", raising=False)
    assert storage._mapped(4096).sum() == 0


def test_room_on_a_disk_is_not_checked_on_windows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delattr(os, "statvfs", raising=False)
    monkeypatch.delattr(os, "geteuid", raising=False)
    sealed.check_room(tmp_path, 1 << 60)


def test_folders_and_processes_are_not_probed_on_windows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for function in ("open", "kill"):
        monkeypatch.setattr(os, function, missing)
    monkeypatch.setattr(os, "name", "nt")
    try:
        sealed.sync_folder(tmp_path)
        stale = sealed._is_stale(tmp_path, 1)
    finally:
        monkeypatch.undo()  # pytest's own paths depend on the name
    assert not stale


def test_memory_is_unknown_without_proc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(storage, "open", missing, raising=False)
    assert storage.free_bytes(torch.device("cpu")) is None
    assert not wide_amd(tmp_path / "cpuinfo")
    monkeypatch.setattr(Path, "read_text", missing)
    assert resident_bytes() > 0  # of getrusage, as on macOS
    monkeypatch.setitem(sys.modules, "resource", None)
    assert math.isnan(resident_bytes())


def test_files_are_mapped_by_python_on_windows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.delattr(mmap, "PROT_READ", raising=False)
    (tmp_path / "file").write_bytes(b"abc")
    with (tmp_path / "file").open("rb") as file:
        assert np.array_equal(trajectory_reader._map_file(file.fileno(), 3), [97, 98, 99])
        with pytest.raises(OSError, match="mmap length"):
            trajectory_reader._map_file(file.fileno(), 1 << 20)


def test_workers_share_memory_without_memfd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create", raising=False)
    descriptor = worker.shared_memory(4096)
    assert os.fstat(descriptor).st_size == 4096
    os.close(descriptor)


def test_worker_is_not_tied_to_its_parent_by_the_kernel_of_macos(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(ctypes, "CDLL", missing)
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    processes.begin_worker(True)


def test_processes_with_pipes_are_refused_on_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(ValueError, match="mode='threads'"):
        rein.make("CartPole-v1", num_envs=2, workers=2, seed=0)
    environment = CartPole(num_envs=2, seed=0)
    with pytest.raises(ValueError, match="background=False"):
        evaluation_process.EvaluationProcess(rein.PPO(environment, seed=0).policy(), environment)


def test_seeds_are_ended_by_closing_their_input_on_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    process: Any = SimpleNamespace(stdin=(read := os.fdopen(os.dup(0), "rb")))
    jobs._stop(process, signal.SIGINT)
    assert read.closed
    received: list[int] = []
    previous = signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
    try:
        monkeypatch.setattr(os, "read", lambda descriptor, count: b"")
        monkeypatch.setattr(os, "kill", missing)
        thread = threading.Thread(target=rein.cli._end_with_parent)
        thread.start()
        thread.join()
    finally:
        signal.signal(signal.SIGTERM, previous)
    assert received == [signal.SIGTERM], END_WITH_PARENT


@pytest.mark.slow
def test_recipe_trains_and_resumes_without_modules_and_functions_of_posix(tmp_path: Path) -> None:
    program = f"""
import os, signal, sys
import gymnasium, h5py, multiprocessing.connection, rich.progress, torch, torch._dynamo, tyro
for name in ("fcntl", "resource", "termios", "pwd", "grp", "syslog"):
    sys.modules[name] = None
for name in ("sched_getaffinity", "statvfs", "geteuid", "posix_fallocate", "memfd_create", "register_at_fork", "fork"):
    delattr(os, name)
for name in {ONLY_POSIX}:
    delattr(signal, name)
from rein.cli import main
main(["train", "cartpole", "--run", "run", "--epochs", "2", "--quiet"])
main(["resume", "run", "--epochs", "3", "--quiet"])
main(["verify", "run"])
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "3 epochs" in done.stdout and "no problems" in done.stdout
