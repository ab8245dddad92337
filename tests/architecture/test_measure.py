"""Tests of the script that measures the size of the code."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).with_name("measure.py")


def script() -> Any:
    spec = importlib.util.spec_from_file_location("measure", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_blank_lines_comments_and_docstrings_do_not_count() -> None:
    source = '"""Module."""\n\n# comment\ndef f(\n    x,\n):\n    """Function."""\n    return """a\n    b"""\n'
    assert script().code_lines(source) == {4, 5, 6, 8, 9}


def test_every_measure_of_this_checkout_is_a_number() -> None:
    table = script().measure(SCRIPT.parents[2])
    assert all(part.replace(",", "").isdigit() for value in table.values() for part in value.split(" / "))
