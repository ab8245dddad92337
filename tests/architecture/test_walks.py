"""The modules and functions that docs/project/architecture.md names exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/project/architecture.md").read_text(encoding="utf-8")
ROWS = [line for line in PAGE.splitlines() if re.match(r"\| \d+ \|", line)]


def test_every_module_of_page_exists() -> None:
    paths = set(re.findall(r"`((?:rein|tests)/[\w/]+\.py)`", PAGE))
    assert len(paths) > 15
    assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []


def test_every_row_names_a_function_of_its_modules() -> None:
    assert len(ROWS) > 20
    for row in ROWS:
        _, _, text, modules, _ = row.split("|")
        source = "\n".join((ROOT / path).read_text(encoding="utf-8") for path in re.findall(r"`([^`]+)`", modules))
        names = re.findall(r"`(\w+(?:\.\w+)?)`", text)
        assert any(re.search(rf"\b(?:def|class) {name.split('.')[-1]}\b", source) for name in names), row


def test_every_subpackage_is_in_diagram() -> None:
    diagram = PAGE.split("```")[1]
    packages = {path.parent.name for path in (ROOT / "rein").glob("*/__init__.py")}
    assert packages <= set(re.findall(r"\w+", diagram))
