"""Names and numbers on `docs/how_to/read_trajectories.md` match the code."""

from __future__ import annotations

import re
from pathlib import Path

from rein.store import datasets
from rein.store.reader import Run

PAGE = (Path(__file__).parents[2] / "docs/how_to/read_trajectories.md").read_text(encoding="utf-8")


def test_attributes_and_numbers_on_the_page_match_the_code():
    for name in re.findall(r"`run\.(\w+)", PAGE):
        assert hasattr(Run, name), name
    assert f"up to {datasets._SMALL >> 20} MiB" in PAGE
