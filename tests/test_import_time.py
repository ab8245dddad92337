"""`import rein` stays quick by leaving to later what only some runs need."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SLOW = ("torch._dynamo", "torch._inductor", "h5py", "rich", "tyro", "pygame", "matplotlib")


@pytest.fixture(scope="module")
def imported() -> set[str]:
    """The modules that importing rein and looking at its loop brings in, beyond those of torch."""
    program = "import sys, torch; before = set(sys.modules); import rein; rein.Loop; print(*set(sys.modules) - before)"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=100)
    return set(result.stdout.split())


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
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100, cwd=tmp_path)
    assert {"sympy", "torch._dynamo", "torch.fx.experimental.symbolic_shapes"}.isdisjoint(result.stdout.split())
