"""The page on logging lists every logger."""

from __future__ import annotations

import re
from pathlib import Path

import rein.handlers.loggers

PAGE = (Path(__file__).parents[2] / "docs/how_to/log_metrics.md").read_text(encoding="utf-8")


def test_every_logger_is_in_the_table_and_can_be_imported_from_the_package() -> None:
    exported = {name for name in dir(rein.handlers.loggers) if name.endswith("Logger")}
    assert exported == set(re.findall(r"^\| `(\w+)\(", PAGE, re.MULTILINE))
    modules = (Path(__file__).parents[2] / "rein/handlers/loggers").glob("*.py")
    assert len(exported) == len({path.stem for path in modules} - {"__init__", "attach", "media"})
    assert all(getattr(rein.handlers.loggers, name).__name__ == name for name in exported)
