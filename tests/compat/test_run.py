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


def test_table_replaces_only_the_rows_of_checked_packages(run: Any) -> None:
    empty = f"before\n{run.BEGIN}\n{run.END}\nafter\n"
    first = run.table(empty, {"highway-env": run.Result(1.0, "1.0", None), "minigrid": run.Result(1.0, "3.0", None)})
    second = run.table(first, {"highway-env": run.Result(1.0, "2.0", None)})
    rows = [line.split("|")[1].strip() for line in second.splitlines() if line.startswith("| ")]
    assert rows == ["package", "minigrid 3.0", "highway-env 2.0"]
    assert second.startswith("before\n") and second.endswith(f"{run.END}\nafter\n")
    assert "fails" in run.table(first, {"minigrid": run.Result(1.0, "", "exit status 1")})


def test_unknown_package_is_refused_with_the_known_names(run: Any) -> None:
    with pytest.raises(SystemExit, match=r"unknown packages: minigird; choose from minigrid"):
        run.main(["minigird"])
