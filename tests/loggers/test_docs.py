"""The examples in `docs/how_to/loggers.md` run, and the page lists every logger."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/how_to/loggers.md").read_text(encoding="utf-8")


def test_examples_run(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    program = "\n".join(re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))
    exec(compile(program, "docs/how_to/loggers.md", "exec"), {})
    assert capsys.readouterr().out.splitlines() == [" 1,000  0.0075", " 2,000  0.0007", "done"]
    assert len((tmp_path / "every-tenth.csv").read_text().splitlines()) == 1 + 4
    assert len((tmp_path / "fine.csv").read_text().splitlines()) == 1 + 40 * 50 // 25


def test_every_logger_is_listed() -> None:
    loggers = {path.stem for path in (ROOT / "rein/handlers/loggers").glob("*.py")} - {"__init__", "attach", "axis"}
    assert loggers == set(re.findall(r"^\| `rein\.handlers\.loggers\.(\w+)\.\w+\(", PAGE, re.MULTILINE))
