"""Measure where the tests spend their time: `python tests/architecture/durations.py [PYTEST OPTION]...` runs them.

Prints the number of tests, CPU seconds with all processes, and seconds per folder, file and test. With `--report FILE`,
reads a JUnit report of pytest instead of running the tests.
"""

from __future__ import annotations

import collections
import resource
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
WORKERS = ["--numprocesses", "auto", "--maxprocesses", "8", "--dist", "worksteal"]
ROWS = 40


class Duration(NamedTuple):
    """Seconds of one test case, with its setup and teardown."""

    file: str
    test: str  # without the parameters of the case
    seconds: float


def read_report(report: Path) -> Iterator[Duration]:
    """Yield the duration of each test case of a JUnit report."""
    for case in ET.parse(report).iter("testcase"):
        parts = case.attrib["classname"].split(".")
        ends = (end for end in range(len(parts), 0, -1) if (ROOT / "/".join(parts[:end])).with_suffix(".py").exists())
        end = next(ends, len(parts))
        test = ".".join([*parts[end:], case.attrib["name"].partition("[")[0]])
        yield Duration("/".join(parts[:end]) + ".py", test, float(case.attrib["time"]))


def folder_of(file: str) -> str:
    """Return the folder within tests, or the file if it has none."""
    return file.removeprefix("tests/").partition("/")[0]


def table(title: str, seconds: collections.Counter[str], total: float, rows: int = ROWS) -> list[str]:
    """Return the lines of a Markdown table, longest durations first."""
    head = [f"| {title} | s | share |", "|---|---|---|"]
    return [*head, *(f"| {name} | {s:.1f} | {s / total:.0%} |" for name, s in seconds.most_common(rows)), ""]


def tables(durations: list[Duration]) -> str:
    """Return the tables of folders, files and tests."""
    folders, files, tests = (collections.Counter[str]() for _ in range(3))
    for file, test, seconds in durations:
        folders[folder_of(file)] += seconds
        files[file] += seconds
        tests[f"{file}::{test}"] += seconds
    total = sum(folders.values())
    lines = [f"{len(durations):,} tests, {total:.0f} s in all", ""]
    lines += table("folder or file", folders, total)
    lines += table("file", files, total)
    lines += table("test, all cases", tests, total)
    return "\n".join(lines)


def run(options: list[str], report: Path) -> int:
    """Run pytest with a report, and print its CPU seconds. Returns the exit status."""
    began = time.monotonic()
    command = [sys.executable, "-m", "pytest", "--quiet", *WORKERS, f"--junitxml={report}", *options]
    status = subprocess.run(command, cwd=ROOT).returncode
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"\n{usage.ru_utime + usage.ru_stime:.0f} CPU seconds, {time.monotonic() - began:.0f} s\n")
    return status


def main(arguments: list[str]) -> int:
    """Run the tests, or read a report, and print the tables."""
    if arguments[:1] == ["--report"]:
        print(tables([*read_report(Path(arguments[1]))]))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        status = run(arguments, report)
        if report.exists():
            print(tables([*read_report(report)]))
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
