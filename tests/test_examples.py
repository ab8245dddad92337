"""Every example runs to its end as its reader would run it, with warnings being errors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))


@pytest.mark.parametrize("example", EXAMPLES, ids=[path.stem for path in EXAMPLES])
def test_the_example_runs(example: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", str(example)]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert result.returncode == 0, result.stdout + result.stderr
