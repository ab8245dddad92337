"""`import rein` stays quick by leaving to later what only some runs need."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SLOW = ("torch._dynamo", "torch._inductor", "h5py", "rich", "tyro", "pygame", "matplotlib", "rein.training.supervised")


def said(program: str, *words: str) -> list[str]:
    """What a process of its own prints that runs `program`."""
    command = [sys.executable, "-c", program, *words]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    return result.stdout.split()


@pytest.fixture(scope="module")
def imported() -> set[str]:
    """The modules that importing rein and looking at its loop brings in, beyond those of torch."""
    program = "import sys, torch; before = set(sys.modules); import rein; rein.Loop; print(*set(sys.modules) - before)"
    return set(said(program))


def test_importing_rein_brings_its_loop(imported: set[str]) -> None:
    assert {"rein", "rein.loop"} <= imported


@pytest.mark.parametrize("module", SLOW)
def test_importing_rein_leaves_it_out(module: str, imported: set[str]) -> None:
    assert module not in imported, f"`import rein` imports {module}; import it where it is used"


def test_a_run_of_ppo_does_without_what_takes_longer_than_it_does(tmp_path: Path) -> None:
    """torch.optim and meta tensors would bring in a compiler and a computer algebra system, a second and a half."""
    train = "from rein.cli import main; main(['train', 'cartpole', '--epochs', '1', '--run', 'run', '--quiet'])"
    program = f"import sys; {train}; print(*sys.modules)"
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert {"sympy", "torch._dynamo", "torch.fx.experimental.symbolic_shapes"}.isdisjoint(result.stdout.split())


@pytest.mark.parametrize("before", ["enable", "disable"])
def test_importing_rein_leaves_the_garbage_collector_as_it_was(before: str) -> None:
    program = f"import gc; gc.{before}(); import rein; print(gc.isenabled(), gc.get_freeze_count())"
    assert said(program) == [str(before == "enable"), "0"]


def test_rein_spares_the_import_of_torch_what_collecting_takes() -> None:
    program = """
import gc, sys
collections = []
gc.callbacks.append(lambda phase, info: collections.append(phase))
__import__(sys.argv[1])
print(collections.count("start"))
"""
    alone, within = (int(said(program, module)[0]) for module in ("torch", "rein"))
    assert within < alone / 10


@pytest.mark.parametrize(
    ("call", "ours"), [("main()", True), ("main(['show', '-h'])", False)], ids=["the command", "a call from Python"]
)
def test_only_the_command_sets_what_was_imported_aside_from_collecting(call: str, ours: bool) -> None:
    """In somebody's own process an object of theirs, set aside, would never be collected."""
    program = f"import gc; from rein.cli import main; {call}; print(gc.get_freeze_count() > 100_000)"
    assert said(program, "show", "-h")[-1] == str(ours)
