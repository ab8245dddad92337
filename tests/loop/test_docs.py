"""The code of docs/reference/loop.md runs, and its tables are complete."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import rein.loop
from rein.loop.clocks import CLOCKS
from rein.loop.filters import UNITS, Filter

PAGE = (Path(__file__).parents[2] / "docs/reference/loop.md").read_text(encoding="utf-8")


def test_code_of_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 5
    exec("\n".join(blocks), {"__name__": "__main__"})
    assert capsys.readouterr().out.startswith("1 6\n2 12\n")


def test_page_names_every_filter_unit_clock_and_option() -> None:
    filters = set(Filter.__annotations__) - {"event"}
    cells = set(re.findall(r"^\| `\"?(\w+)", PAGE, re.MULTILINE))
    assert filters <= cells
    assert set(UNITS) <= cells
    options = set(rein.Loop.__init__.__kwdefaults__ or {})
    assert options <= set(re.findall(r"`(\w+)=(?:True)?`", PAGE))
    assert all(name in PAGE for name in CLOCKS)


def test_diagram_of_the_page_equals_that_of_the_package() -> None:
    drawing = re.search(r"^```\n(started.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert drawing is not None
    diagram = [line.strip() for line in (rein.loop.__doc__ or "").splitlines() if line.startswith("    ")]
    assert [line.strip() for line in drawing[1].splitlines()] == diagram
