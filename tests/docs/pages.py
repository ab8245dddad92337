"""Code blocks of Markdown pages, extracted so that the tests can run them."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
FENCE = re.compile(r"^```(python|\{code-cell\} ipython3|sh)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CELL_OPTIONS = re.compile(r"^:[\w-]+:.*\n", re.MULTILINE)


def blocks(page: Path) -> list[tuple[str, str]]:
    """Return the language, "python" or "sh", and the text of each block that is run, in order.

    Blocks in other forms, such as ``{code-block} python``, are shown and not run.
    """
    found = FENCE.findall(page.read_text(encoding="utf-8"))
    return [("sh" if language == "sh" else "python", CELL_OPTIONS.sub("", text)) for language, text in found]


def python_of(page: Path) -> str:
    """Return the Python blocks of a page as one program."""
    return "\n".join(text for language, text in blocks(page) if language == "python")


def shell_of(page: Path) -> list[str]:
    """Return the `rein` commands in the shell blocks of a page."""
    lines = [line for language, text in blocks(page) if language == "sh" for line in text.splitlines()]
    return [line for line in lines if line.startswith("rein ")]


def section(name: str) -> list[Path]:
    """Return the pages of a section in the order of the navigation."""
    _, *toctrees = (DOCS / name / "index.md").read_text(encoding="utf-8").split("```{toctree}\n")
    return [DOCS / name / f"{entry}.md" for tree in toctrees for entry in re.findall(r"^(\w+)$", tree, re.MULTILINE)]
