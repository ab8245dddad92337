"""`rein doctor`: show versions and optional packages, and test training and its files."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import h5py
import torch
from rich.table import Table

import rein.cli
from rein.accelerate.products import suits_onednn
from rein.agents.ppo import PPO
from rein.cli.run_folder import plain
from rein.cli.terminal import say
from rein.envs.cartpole import CartPole
from rein.errors import StoreError
from rein.handlers.checkpoint import checkpoint
from rein.loop.info import version_of
from rein.store.hdf5 import HDF5Store
from rein.store.verify import verify_run
from rein.training.saved_agents import load_agent
from rein.training.training_loop import training_loop

_NAME = re.compile(r"([\w.-]+)(?:\[([\w.,-]+)\])?")  # a requirement with its extras
_EXTRA = re.compile(r"extra == ['\"]([\w.-]+)['\"]")
_PYTHON = re.compile(r"python_version (<|>=) ['\"](\d+)\.(\d+)['\"]")


def doctor() -> None:
    """Show versions, optional packages and hardware, for example for a bug report.

    Trains for a second in a temporary folder, and exits with status 1 if that fails.
    """
    for table in (_versions(), _extras()):
        say(table)
        say()
    with tempfile.TemporaryDirectory(prefix="rein-doctor-") as folder:
        for line in check(Path(folder) / "run"):
            say(line)


def _versions() -> Table:
    table = Table.grid(padding=(0, 2))
    folder = Path(rein.cli.__file__).parents[1]
    table.add_row("rein", plain(f"{version_of('rein')}, {folder}"))
    table.add_row("Python", f"{platform.python_version()}, {platform.platform()}")
    table.add_row("machine", f"{os.cpu_count()} cores, {platform.machine()}")
    threads = torch.get_num_threads()
    table.add_row("torch", f"{_version('torch')}, {threads} thread{'s' * (threads != 1)}, {_accelerator()}")
    backend = "oneDNN" if suits_onednn() else "torch's default"
    table.add_row("matmul", f"{backend}, for large float32 products in updates")
    table.add_row("h5py", f"{_version('h5py')}, HDF5 {h5py.version.hdf5_version}")
    for name in sorted({name for name, _ in _requirements("rein-rl", None)} - {"torch", "h5py"}):
        table.add_row(name, _version(name) or "missing")
    return table


def _accelerator() -> str:
    if not torch.cuda.is_available():
        return "no CUDA"
    return f"CUDA {torch.version.cuda}: {plain(torch.cuda.get_device_name())}"


def _extras() -> Table:
    """Return a table of rein's extras, with the versions of their packages."""
    table = Table("extra", "packages", box=None, pad_edge=False, header_style="bold")
    try:
        extras = importlib.metadata.metadata("rein-rl").get_all("Provides-Extra") or []
    except importlib.metadata.PackageNotFoundError:  # rein is not installed, only imported from a source tree
        extras = []
    for extra in sorted(extras):
        needed = sorted(set(_needed("rein-rl", extra)))
        table.add_row(extra, ", ".join(f"{name} {_version(name) or 'missing'}" for name in needed))
    return table


def _needed(package: str, extra: str) -> Iterator[str]:
    """Yield the packages of an extra, including those of nested extras."""
    for name, extras in _requirements(package, extra):
        for other in extras:
            yield from _needed(name, other)
        if not extras:
            yield name


def _requirements(package: str, extra: str | None) -> Iterator[tuple[str, list[str]]]:
    """Yield (name, extras) of the requirements of a package or of one of its extras; none if it is missing."""
    try:
        every = importlib.metadata.requires(package) or []
    except importlib.metadata.PackageNotFoundError:
        return
    for line in every:
        marker, name, python = _EXTRA.search(line), _NAME.match(line), _PYTHON.search(line)
        older = python is not None and sys.version_info[:2] < (int(python[2]), int(python[3]))
        ours = python is None or older == (python[1] == "<")
        if name is not None and ours and (marker[1] if marker else None) == extra:
            yield name[1], name[2].split(",") if name[2] else []


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def check(path: Path) -> Iterator[str]:
    """Train for an epoch, verify the files in `path` and load the agent. Yields a line for each success."""
    environment = CartPole(num_envs=16, seed=0)
    agent = PPO(environment.single_observation_space, environment.single_action_space, seed=0)
    store = HDF5Store(path)
    loop = training_loop(agent, environment, store, epochs=1, iterations=64)
    checkpoint(loop, store)
    begun = time.perf_counter()
    state = loop.run()
    store.close()
    yield f"training: ok, {state.clocks.env_steps:,} env steps of CartPole in {time.perf_counter() - begun:.2f} s"
    report = verify_run(path)
    for file, reason in report.problems:
        raise StoreError(f"{file}: {reason}")
    yield f"files: ok, {report.files:,} files of {report.bytes / 1e6:.1f} MB written and verified"
    if load_agent(path).env_steps != state.clocks.env_steps:
        raise StoreError(f"{path}: the loaded agent differs from the saved one")
    yield "checkpoints: ok, the saved agent was loaded"
