"""Files of trajectories from anybody: read, shown and verified, a mutant does no more than raise a StoreError."""

from __future__ import annotations

import collections
import json
import random
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rein.cli import main

FUZZED = Path(__file__).with_name("fuzzed.py")
MUTANTS = runpy.run_path(str(Path(__file__).with_name("mutants.py")))
WAYS = ("read", "show", "verify")
SECONDS, MEMORY = 5.0, 1 << 30


def fuzz(folder: Path, count: int) -> list[dict[str, Any]]:
    """What became of mutants 0 to `count`, made and read by two processes where there are many."""
    half = count // 2 if count > 1000 else count
    running = []
    for first, stop in ((0, half), (half, count))[: 2 if half < count else 1]:
        place = folder / str(first)
        place.mkdir()
        command = [sys.executable, FUZZED, *map(str, (place, first, stop, 0))]
        with (place / "said").open("w") as said, (place / "errors").open("w") as errors:
            running.append((subprocess.Popen(command, stdout=said, stderr=errors), place))
    for process, place in running:
        assert process.wait(3000) == 0, (place / "errors").read_text()
    return [json.loads(line) for _, place in running for line in (place / "said").read_text().splitlines()]


def wrong(one: dict[str, Any]) -> str:
    """What is wrong with how a mutant was treated."""
    if "died" in one:
        return f"the process died: {one['died']}"
    told = [f"{way}: {one[way]}" for way in WAYS if one[way][0] not in ("read", "refused")]
    told += [f"took {one['seconds']:.1f} s"] if one["seconds"] > SECONDS else []
    return "\n".join(told + ([f"took {one['bytes']:,} bytes"] if one["bytes"] > MEMORY else []))


@pytest.mark.timeout(3600)
def test_a_mutant_does_no_more_than_raise_a_store_error(tmp_path: Path, scale: Callable[[int, int], int]) -> None:
    assert len(MUTANTS["KINDS"]) >= 40
    count = scale(5000, 150)
    said = fuzz(tmp_path, count)
    assert [one["number"] for one in said] == list(range(count))
    bad = [f"mutant {one['number']} ({one['kind']}): {why}" for one in said if (why := wrong(one))]
    assert not bad, "\n\n".join(bad[:10])
    kinds = {one["kind"] for one in said}
    assert kinds >= {*MUTANTS["KINDS"]}
    refused = collections.Counter(one["number"] % 2 for one in said if one["read"][0] == "refused")
    assert refused[1] >= 0.98 * (count // 2)  # the others have the hash of the file that they were made of, or are it
    assert refused[0] > count // 8 and refused[0] < count // 2
    seconds, size = max(one["seconds"] for one in said), max(one["bytes"] for one in said) / 2**20
    print(
        f"mutants of trajectories: {count} of {len(kinds)} kinds, {sum(refused.values())} refused, {refused[0]} of them"
        f" with a right hash, the others without harm; 0 other errors, 0 processes died; at most {seconds:.1f} s of"
        f" processor time and {size:.0f} MiB"
    )


def test_the_command_line_tells_of_a_mutant_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bases = MUTANTS["make_bases"](tmp_path)
    path = tmp_path / "run" / "trajectories" / MUTANTS["NAME"]
    path.parent.mkdir(parents=True)
    for number in (0, 1):
        MUTANTS["make_mutant"](number, random.Random(number), bases, path)
        for words in (["show", str(path)], ["verify", str(path.parents[1])]):
            with pytest.raises(SystemExit) as end:
                main(words)
            said = capsys.readouterr()
            assert end.value.code == 1
            lines = said.err.splitlines() if words[0] == "show" else said.out.splitlines()[:-1]
            assert len(lines) == 1 and str(path) in lines[0], lines
