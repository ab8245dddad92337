"""The code on the pages of the documentation runs."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest

from tests import programs
from tests.docs.pages import DOCS, python_of, section, shell_of

WALK = [*section("get_started"), *section("tutorials")]
ELSEWHERE = {"reference/file_format.md"}  # run by the tests of their subject
OTHERS = sorted(
    page
    for page in DOCS.rglob("*.md")
    if page not in WALK and python_of(page) and str(page.relative_to(DOCS)) not in ELSEWHERE
)
ENVIRONMENT = {**os.environ, "MPLBACKEND": "agg"}
# Notebooks have `display` without an import.
PRELUDE = """
class Handle:
    def update(self, shown): ...

def display(shown, display_id): return Handle()

"""


def run(page: Path, folder: Path) -> None:
    """Run the Python of a page, and then its `rein` commands, in a folder."""
    program = folder / f"{page.parent.name}_{page.stem}.py"
    program.write_text(PRELUDE + python_of(page), encoding="utf-8")
    programs.run(program, cwd=folder, env=ENVIRONMENT)
    for line in shell_of(page):
        programs.run("-m", *shlex.split(line, comments=True), cwd=folder, env=ENVIRONMENT)


@pytest.mark.slow
def test_get_started_and_the_tutorials_run_in_order(tmp_path: Path) -> None:
    for page in WALK:
        run(page, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("page", OTHERS, ids=lambda page: str(page.relative_to(DOCS)))
def test_page_runs(page: Path, tmp_path: Path) -> None:
    run(page, tmp_path)
