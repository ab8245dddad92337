"""Tests of the script that breaks lines, and of the one that measures durations."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.architecture.durations import Duration, read_report, tables
from tests.architecture.mutate import mutants

SOURCE = '''
def clip(x, low: int = 0, high: int = 3):
    """Docstring."""
    if x < low:
        raise ValueError(f"{x} is below {low - 1}")
    x.count += 1
    return (x - low) / (
        high or 1
    )
'''


def test_mutants_are_valid_and_differ_in_one_place() -> None:
    found = mutants("rein/clip.py", SOURCE)
    assert {(mutant.line, mutant.what) for mutant in found} == {
        (4, "negated condition"),
        (4, "off by one"),
        (5, "dropped statement"),
        (6, "dropped statement"),
        (6, "off by one"),
        (7, "swapped operands"),
        (8, "off by one"),
    }
    for mutant in found:
        assert ast.dump(ast.parse(mutant.source)) != ast.dump(ast.parse(SOURCE))
        assert mutant.source.count("\n") == SOURCE.count("\n")


def test_messages_and_docstrings_are_not_changed() -> None:
    assert all("is below {low - 1}" in mutant.source or mutant.line == 5 for mutant in mutants("rein/clip.py", SOURCE))


def test_durations_are_added_by_folder_file_and_test(tmp_path: Path) -> None:
    cases = [("tests.loop.test_order", "test_a[1]", 1.0), ("tests.loop.test_order", "test_a[2]", 2.0)]
    cases += [("tests.test_saved.TestAgent", "test_b", 1.0)]
    rows = [f'<testcase classname="{name}" name="{test}" time="{seconds}"/>' for name, test, seconds in cases]
    (tmp_path / "report.xml").write_text(f"<testsuite>{''.join(rows)}</testsuite>")
    found = [*read_report(tmp_path / "report.xml")]
    assert found[1:] == [
        Duration("tests/loop/test_order.py", "test_a", 2.0),
        Duration("tests/test_saved.py", "TestAgent.test_b", 1.0),
    ]
    shown = tables(found)
    assert "3 tests, 4 s in all" in shown
    assert "| loop | 3.0 | 75% |" in shown
    assert "| tests/test_saved.py::TestAgent.test_b | 1.0 | 25% |" in shown
