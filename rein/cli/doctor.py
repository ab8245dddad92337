"""`rein doctor`: what rein runs on here, and whether training and its files work."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import h5py
import torch
from rich.table import Table

import rein.cli
from rein.agents.ppo import PPO
from rein.cli.output import say
from rein.cli.run_folder import plain
from rein.envs.cartpole import CartPole
from rein.errors import StoreError
from rein.handlers.checkpoint import checkpoint
from rein.loop.info import version_of
from rein.ops.backend import suits_onednn
from rein.store.hdf5 import HDF5Store
from rein.store.verify import verify_run
from rein.training.saved_agents import load_agent
from rein.training.training_loop import training_loop

_USAGE = """\
rein doctor: prints versions, optional packages and what the machine has, for reports of bugs too; trains for a second
in a temporary folder, and ends with status 1 where that does not work"""
_NAME = re.compile(r"([\w.-]+)(?:\[([\w.,-]+)\])?")  # of a requirement, with its own extras
_EXTRA = re.compile(r"extra == ['\"]([\w.-]+)['\"]")
_PYTHON = re.compile(r"python_version (<|>=) ['\"](\d+)\.(\d+)['\"]")


def main(arguments: Sequence[str]) -> None:
    """The command `rein doctor`."""
    if {"-h", "--help"} & {*arguments}:
        say(f"usage: {_USAGE}")
        return
    if arguments:
        raise ValueError(f"rein doctor takes nothing more, not {' '.join(arguments)}")
    say(_versions())
    say(_extras())
    with tempfile.TemporaryDirectory(prefix="rein-doctor-") as folder:
        for line in check(Path(folder) / "run"):
            say(line)


def _versions() -> Table:
    table = Table.grid(padding=(0, 2))
    where = Path(rein.cli.__file__).parents[1]
    table.add_row("rein", plain(f"{version_of('rein')}, {where}"))
    table.add_row("Python", f"{platform.python_version()}, {platform.platform()}")
    table.add_row("machine", f"{os.cpu_count()} cores, {platform.machine()}")
    threads = torch.get_num_threads()
    table.add_row("torch", f"{_version('torch')}, {threads} thread{'s' * (threads != 1)}, {_accelerator()}")
    products = "oneDNN's" if suits_onednn() else "torch's own choice"
    table.add_row("products", f"of large float32 matrices, to learn by: {products}")
    table.add_row("h5py", f"{_version('h5py')}, HDF5 {h5py.version.hdf5_version}")
    for name in sorted({name for name, _ in _requirements("rein-rl", None)} - {"torch", "h5py"}):
        table.add_row(name, _version(name) or "missing")
    return table


def _accelerator() -> str:
    if not torch.cuda.is_available():
        return "no CUDA"
    return f"CUDA {torch.version.cuda}: {plain(torch.cuda.get_device_name())}"


def _extras() -> Table:
    """Every extra of rein's, and what of it is missing."""
    table = Table("extra", "what it needs", box=None, pad_edge=False, header_style="bold")
    try:
        extras = importlib.metadata.metadata("rein-rl").get_all("Provides-Extra") or []
    except importlib.metadata.PackageNotFoundError:  # a source tree that was not installed
        extras = []
    for extra in sorted(extras):
        needed = sorted(set(_needed("rein-rl", extra)))
        table.add_row(extra, ", ".join(f"{name} {_version(name) or 'missing'}" for name in needed))
    return table


def _needed(package: str, extra: str) -> Iterator[str]:
    """The packages that an extra asks for, those of other packages' extras among them."""
    for name, extras in _requirements(package, extra):
        for other in extras:
            yield from _needed(name, other)
        if not extras:
            yield name


def _requirements(package: str, extra: str | None) -> Iterator[tuple[str, list[str]]]:
    """What a package needs, or an extra of it does, as names with the extras that are asked for; none where missing."""
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
    """Train for an epoch, verify what was written into `path`, and load the agent: a line for each that worked.

    Raises what went wrong.
    """
    environment = CartPole(num_envs=16, seed=0)
    agent = PPO(environment.single_observation_space, environment.single_action_space, seed=0)
    store = HDF5Store(path)
    loop = training_loop(agent, environment, store, epochs=1, iterations=64)
    checkpoint(loop, store)
    begun = time.perf_counter()
    state = loop.run()
    store.close()
    yield f"training works: {state.clocks.env_steps:,} env steps of CartPole in {time.perf_counter() - begun:.2f} s"
    report = verify_run(path)
    for file, reason in report.problems:
        raise StoreError(f"{file}: {reason}")
    yield f"files work: {report.files:,} of {report.bytes / 1e6:.1f} MB written and verified"
    if load_agent(path).env_steps != state.clocks.env_steps:
        raise StoreError(f"{path}: another agent was loaded than was saved")
    yield "checkpoints work: the agent was loaded again"
