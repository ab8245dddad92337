"""`docs/reference/wrappers.md` lists every wrapper. `tests/docs` runs its code."""

from __future__ import annotations

import re
from pathlib import Path

import rein

PAGE = (Path(__file__).parents[3] / "docs/reference/wrappers.md").read_text(encoding="utf-8")


def test_documentation_lists_every_wrapper() -> None:
    (shown,) = re.findall(r"^from rein\.envs\.wrappers import \((.*?)\)", PAGE, re.MULTILINE | re.DOTALL)
    assert shown.replace(",", " ").split() == rein.envs.wrappers.__all__
