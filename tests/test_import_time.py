"""`import rein` is fast, because it does not import packages that only some runs need."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SLOW = ("torch._dynamo", "torch._inductor", "h5py", "rich", "tyro", "pygame", "matplotlib", "rein.training.supervised")


def output_of(program: str, *words: str) -> list[str]:
    """Run a program in a new process and return the words that it prints."""
    command = [sys.executable, "-c", program, *words]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    return result.stdout.split()


@pytest.fixture(scope="module")
def imported() -> set[str]:
    """Return the modules that `import rein; rein.Loop` imports besides those of torch."""
    program = "import sys, torch; before = set(sys.modules); import rein; rein.Loop; print(*set(sys.modules) - before)"
    return set(output_of(program))


def test_import_of_rein_includes_loop(imported: set[str]) -> None:
    assert {"rein", "rein.loop"} <= imported


@pytest.mark.parametrize("module", SLOW)
def test_import_of_rein_excludes_slow_modules(module: str, imported: set[str]) -> None:
    assert module not in imported, f"`import rein` imports {module}; import it where it is used"


def test_ppo_run_imports_no_compiler(tmp_path: Path) -> None:
    """torch.optim and meta tensors would import a compiler and sympy, which takes 1.5 seconds."""
    train = "from rein.cli import main; main(['train', 'cartpole', '--epochs', '1', '--run', 'run', '--quiet'])"
    program = f"import sys; {train}; print(*sys.modules)"
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert {"sympy", "torch._dynamo", "torch.fx.experimental.symbolic_shapes"}.isdisjoint(result.stdout.split())


def test_general_help_and_list_of_recipes_do_not_import_torch() -> None:
    program = """
import contextlib, io, sys
from rein.cli import main
for words in ["--help"], ["train", "--help"], ["resume", "--help"], ["sweep", "--help"], ["list"]:
    with contextlib.redirect_stdout(io.StringIO()) as text, contextlib.suppress(SystemExit):
        main(words)
    print(len(text.getvalue()) > 100, "torch" in sys.modules)
"""
    assert output_of(program) == ["True", "False"] * 5


@pytest.mark.default_cases("enable")
@pytest.mark.parametrize("before", ["enable", "disable"])
def test_import_of_rein_restores_garbage_collector(before: str) -> None:
    frozen = "gc.get_freeze_count()"  # Python 3.12 begins with 375
    program = f"import gc; gc.{before}(); before = {frozen}; import rein; print(gc.isenabled(), {frozen} - before)"
    assert output_of(program) == [str(before == "enable"), "0"]


def test_import_of_torch_runs_without_garbage_collection() -> None:
    program = """
import gc, sys
collections = []
gc.callbacks.append(lambda phase, info: collections.append(phase))
__import__(sys.argv[1])
print(collections.count("start"))
"""
    alone, within = (int(output_of(program, module)[0]) for module in ("torch", "rein"))
    assert within < alone / 10


@pytest.mark.default_cases("a call from Python")
@pytest.mark.parametrize(
    ("call", "frozen"), [("main()", True), ("main(['show', '-h'])", False)], ids=["the command", "a call from Python"]
)
def test_only_command_line_freezes_garbage_collector(call: str, frozen: bool) -> None:
    """In other processes, frozen objects of the user would never be collected."""
    program = f"""
import contextlib, gc
from rein.cli import main
with contextlib.suppress(SystemExit):
    {call}
print(gc.get_freeze_count() > 100_000)
"""
    assert output_of(program, "show", "-h")[-1] == str(frozen)
