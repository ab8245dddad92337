"""The reference pages of the loop name every event, filter, unit, clock and option."""

from __future__ import annotations

import re

import rein.loop
from rein.loop.filters import UNITS, Filter
from rein.loop.state import CLOCKS
from tests.docs.pages import DOCS

REFERENCE = DOCS / "reference"


def test_page_names_every_filter_unit_and_clock() -> None:
    page = (REFERENCE / "clocks_and_filters.md").read_text(encoding="utf-8")
    cells = set(re.findall(r"^\| `\"?(\w+)", page, re.MULTILINE))
    assert set(Filter.__annotations__) - {"event"} <= cells
    assert set(UNITS) <= cells
    assert all(name in page for name in CLOCKS)


def test_page_names_every_option_of_a_loop() -> None:
    page = (REFERENCE / "loop.md").read_text(encoding="utf-8")
    options = set(rein.Loop.__init__.__kwdefaults__ or {})
    assert options <= set(re.findall(r"`(\w+)=(?:True)?`", page))


def test_order_of_events_on_the_page_equals_the_docstring() -> None:
    page = (REFERENCE / "events.md").read_text(encoding="utf-8")
    drawing = re.search(r"^```\n(started.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert drawing is not None
    documented = [line.strip() for line in (rein.loop.__doc__ or "").splitlines() if line.startswith("    ")]
    assert [line.strip() for line in drawing[1].splitlines()] == documented
