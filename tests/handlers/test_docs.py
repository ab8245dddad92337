"""The examples in `docs/reference/handlers.md` run, and the page has a section for every handler."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import rein
from rein.loop.state import State

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/reference/handlers.md").read_text(encoding="utf-8")


def test_examples_run(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    program = "\n".join(re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))
    names: dict[str, object] = {}
    exec(compile(program, "docs/reference/handlers.md", "exec"), names)
    final = names["loop"].run()  # type: ignore[attr-defined]  # the loop of the page
    assert isinstance(final, State)
    assert final.status in ("completed", "halted")
    assert (tmp_path / "runs/described/run.json").is_file()
    written = capsys.readouterr().out.splitlines()
    assert "epoch 10  iteration 50  env_steps 8,000" in written
    assert any(re.match(r"  evaluation  return +", line) for line in written)
    assert re.match(r"gridworld  +\d+%  [\d,]+ env_steps  [\d,]+/s  return \S+  (completed|halted)", written[-1])


def test_every_handler_has_a_section() -> None:
    sections = set(re.findall(r"^## (\w+)$", PAGE, re.MULTILINE))
    handlers: Any = rein.handlers
    described: dict[str, str] = dict.fromkeys(("guard_data", "guard_updates", "UpdateGuard"), "guards")
    assert {described.get(name, name) for name in handlers.__all__} - sections == set()
