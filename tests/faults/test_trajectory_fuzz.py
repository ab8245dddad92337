"""Untrusted trajectory files: a mutant that is read, shown or verified only raises StoreError."""

from __future__ import annotations

import collections
import json
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import programs

FUZZED = Path(__file__).with_name("fuzzed.py")
MUTANTS = runpy.run_path(str(Path(__file__).with_name("mutants.py")))
WAYS = ("read", "show", "verify")
SECONDS, MEMORY = 5.0, 1 << 30


def fuzz(folder: Path, count: int) -> list[dict[str, Any]]:
    """Make and read mutants 0 to `count`, in two processes if there are many. Returns the reports."""
    half = count // 2 if count > 1000 else count
    running = []
    for first, stop in ((0, half), (half, count))[: 2 if half < count else 1]:
        place = folder / str(first)
        place.mkdir()
        running.append(programs.Program(FUZZED, place, first, stop, 0))
    ended = [program.wait() for program in running]
    assert [done.returncode for done in ended] == [0] * len(ended), ended[0].stderr
    return [json.loads(line) for done in ended for line in done.stdout.splitlines()]


def wrong(one: dict[str, Any]) -> str:
    """Return the failures of a mutant's report."""
    if "died" in one:
        return f"the process died: {one['died']}"
    failures = [f"{way}: {one[way]}" for way in WAYS if one[way][0] not in ("read", "refused")]
    failures += [f"took {one['seconds']:.1f} s"] if one["seconds"] > SECONDS else []
    return "\n".join(failures + ([f"took {one['bytes']:,} bytes"] if one["bytes"] > MEMORY else []))


@pytest.mark.timeout(3600)
def test_mutants_only_raise_store_error(tmp_path: Path, scale: Callable[[int, int], int]) -> None:
    assert len(MUTANTS["KINDS"]) >= 40
    count = scale(2000, 150)
    found = fuzz(tmp_path, count)
    assert [one["number"] for one in found] == list(range(count))
    bad = [f"mutant {one['number']} ({one['kind']}): {why}" for one in found if (why := wrong(one))]
    assert not bad, "\n\n".join(bad[:10])
    kinds = {one["kind"] for one in found}
    assert kinds >= {*MUTANTS["KINDS"]}
    refused = collections.Counter(one["number"] % 2 for one in found if one["read"][0] == "refused")
    assert refused[1] >= 0.98 * (count // 2)  # the others equal their base
    assert refused[0] > count // 8 and refused[0] < count // 2
    seconds, size = max(one["seconds"] for one in found), max(one["bytes"] for one in found) / 2**20
    print(
        f"mutants of trajectory files: {count} of {len(kinds)} kinds, {sum(refused.values())} refused, {refused[0]} of"
        f" them with a correct hash, the others harmless; 0 other errors, 0 processes died; at most {seconds:.1f} s of"
        f" processor time and {size:.0f} MiB"
    )
