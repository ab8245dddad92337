"""Tests of the driver of `make test-compat` that need none of the packages."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    return importlib.import_module("run")


def test_table_has_a_row_for_every_package(run: Any) -> None:
    page = run.PAGE.read_text(encoding="utf-8")
    assert re.findall(r"^\| (\S+)", page.split(run.BEGIN)[1].split(run.END)[0], re.MULTILINE) == [
        "package",
        *run.CASES,
    ]
