"""Tests of the script that measures the size of the code."""

from __future__ import annotations

from tests.architecture import measure


def test_blank_lines_comments_and_docstrings_do_not_count() -> None:
    source = '"""Module."""\n\n# comment\ndef f(\n    x,\n):\n    """Function."""\n    return """a\n    b"""\n'
    assert measure.code_lines(source) == {4, 5, 6, 8, 9}


def test_every_measure_of_this_checkout_is_a_number() -> None:
    table = measure.measure(measure.PACKAGE)
    assert all(part.replace(",", "").isdigit() for value in table.values() for part in value.split(" / "))
