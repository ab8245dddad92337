"""Every benchmark runs with tiny sizes."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests import programs

FOLDER = Path(__file__).with_name("benchmarks")
SCRIPTS = sorted(path.stem for path in FOLDER.glob("*.py"))
TINY = {"REIN_TINY_BENCHMARKS": "1"}
ARGUMENTS = {
    "off_policy": ["--agents", "SAC", "DQN", "--repeated"],
    "results": ["train", "sign-bandit", "--seeds", "1"],
    "storage": ["reading"],  # storage_writing.py is a separate script
}


def run(*words: object, cwd: Path) -> str:
    return programs.run(*words, cwd=cwd, env={**os.environ, **TINY}).stdout


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="some benchmarks read /proc")
@pytest.mark.parametrize("script", SCRIPTS)
def test_benchmark_runs(script: str, tmp_path: Path) -> None:
    output = run(FOLDER / f"{script}.py", *ARGUMENTS.get(script, []), cwd=tmp_path)
    assert output or script in ("sizes", "measuring")
    assert "Error" not in output  # tables show the error of a process that has died


@pytest.mark.slow
def test_each_row_of_results_trains(tmp_path: Path) -> None:
    program = """
import sys
from pathlib import Path

sys.path.insert(0, sys.argv[1])
import results

rows = [name for name, row in results.ROWS.items() if not row.kind.startswith("sb3")]
for name in rows:
    print(name, flush=True)
    results.train_one(name, 0, Path(f"{name}-0"))
assert len(results.table(Path()).splitlines()) == 2 + len(rows)
"""
    run("-c", program, FOLDER, cwd=tmp_path)
