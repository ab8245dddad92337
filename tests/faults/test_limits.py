"""Counts in received files: files beyond a limit are refused in one line, without much time or memory."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import programs

LIMITED = Path(__file__).with_name("limited.py")
SECONDS, MEMORY = 5.0, 1 << 30
FILES = {"config.toml": 16, "run.json": 9, "metrics.csv": 6, "safetensors": 9, "checkpoint": 2}


def wrong(one: dict[str, Any]) -> str:
    """Return the failures of the report about a file."""
    if one["died"] or "kind" not in one:
        return f"{one['name']}: the process died: {one['died']}"
    failures = [f"{one['kind']}: {one['text'][-2000:]}"] if one["kind"] != "refused" else []
    lines = [line for line in one["text"].splitlines() if not line.endswith("problems in 1")]  # of rein verify
    failures += [f"printed {one['text']!r}"] if len(lines) != 1 else []
    failures += [f"took {one['seconds']:.1f} s"] if one["seconds"] > SECONDS else []
    failures += [f"took {one['bytes']:,} bytes"] if one["bytes"] > MEMORY else []
    return "".join(f"{one['name']}: {failure}\n" for failure in failures)


@pytest.mark.skipif(sys.platform != "linux", reason="needs limits on memory")
@pytest.mark.default_cases("config.toml", "run.json")
@pytest.mark.parametrize("kind", FILES)
def test_file_beyond_a_limit_is_refused_in_one_line(tmp_path: Path, kind: str) -> None:
    found = [json.loads(line) for line in programs.run(LIMITED, tmp_path, kind).stdout.splitlines()]
    assert len(found) == FILES[kind]
    assert "".join(map(wrong, found)) == ""
    seconds, memory = max(one["seconds"] for one in found), max(one["bytes"] for one in found) / 2**20
    print(f"{kind}: {len(found)} files refused, at most {seconds:.1f} s and {memory:.0f} MiB")
