"""Check that the default tests notice broken code: `python tests/architecture/mutate.py --seed 0`.

Draws executed lines of rein, breaks each of them in a copy of the checkout, and runs the default tests that execute
the line. If all of them pass, runs the slow tests in the files of these tests. Prints a table. The tests that execute
each line come from a run of the default tests with coverage, which is repeated when the code has changed. This module
is also the plugin of pytest in these runs.
"""

from __future__ import annotations

import argparse
import ast
import collections
import contextlib
import copy
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import coverage
import pytest

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "mutations"
COPY = BUILD / "checkout"
DEFAULT, SLOW = "not slow", "slow"  # markers
SECONDS = 150  # limit of the tests of one mutant in one tier; a mutant that needs longer counts as survived
SETTINGS = """[run]
source = {copy}/rein
data_file = {folder}/parts/coverage
parallel = true
context = ${{PYTEST_CURRENT_TEST-}}
patch =
    fork
    _exit
"""
FOLDER, SELECTED = "REIN_MUTATE_FOLDER", "REIN_MUTATE_TESTS"  # environment variables of the plugin


# Plugin of pytest: contexts of coverage while the tests that execute each line are collected, and selection of tests.


def _switch(context: str) -> None:
    if (current := coverage.Coverage.current()) is not None:
        current.switch_context(context)


def pytest_configure() -> None:
    """Give forked processes the context of their test."""
    os.register_at_fork(after_in_child=lambda: _switch(os.environ.get("PYTEST_CURRENT_TEST", "")))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Record lines as those of the test."""
    _switch(item.nodeid)
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: Any, request: Any) -> Iterator[None]:
    """Record lines of a fixture that several tests share as those of the fixture."""
    shared = fixturedef.scope != "function"
    if shared:
        _switch(f"{fixturedef.baseid}::{fixturedef.argname}")
    try:
        return (yield)
    finally:
        if shared:
            _switch(request.session.config.stash.get(_RUNNING, ""))


_RUNNING = pytest.StashKey[str]()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Remember the test that runs."""
    item.config.stash[_RUNNING] = item.nodeid


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the selected tests, fast ones first, or write the shared fixtures of all tests."""
    if path := os.environ.get(SELECTED):
        order = {test: number for number, test in enumerate(json.loads(Path(path).read_text()))}
        items[:] = sorted((item for item in items if item.nodeid in order), key=lambda item: order[item.nodeid])
    elif FOLDER in os.environ and os.environ.get("PYTEST_XDIST_WORKER") == "gw0":
        fixtures = {item.nodeid: [*_shared_fixtures(item)] for item in items}
        Path(os.environ[FOLDER], "fixtures.json").write_text(json.dumps(fixtures))


def _shared_fixtures(item: Any) -> Iterator[str]:
    for definitions in item._fixtureinfo.name2fixturedefs.values():
        for definition in definitions:
            if definition.scope != "function":
                yield f"{definition.baseid}::{definition.argname}"


_seconds: collections.Counter[str] = collections.Counter()
_failed: set[str] = set()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Add up the seconds of each test."""
    _seconds[report.nodeid] += report.duration
    if report.failed:
        _failed.add(report.nodeid)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the seconds of all tests that passed."""
    if FOLDER in os.environ and "PYTEST_XDIST_WORKER" not in os.environ:
        passed = {test: seconds for test, seconds in _seconds.items() if test not in _failed}
        Path(os.environ[FOLDER], "seconds.json").write_text(json.dumps(passed))


# Tests that execute each line.


class Tests:
    """Default tests by the lines that they execute."""

    def __init__(self) -> None:
        folder = BUILD / "default"
        self.seconds: dict[str, float] = json.loads((folder / "seconds.json").read_text())
        users = collections.defaultdict[str, list[str]](list)
        for test, fixtures in json.loads((folder / "fixtures.json").read_text()).items():
            for fixture in fixtures:
                users[fixture].append(test)
        self._users = users
        self._data = coverage.CoverageData(str(folder / "coverage"))
        self._data.read()

    def files(self) -> list[str]:
        """Return the files of rein with executed lines, relative to the checkout."""
        return sorted(str(Path(path).relative_to(COPY)) for path in self._data.measured_files())

    def lines(self, file: str) -> dict[int, list[str]]:
        """Return the tests that execute each line of a file, fast ones first."""
        return {
            line: tests
            for line, contexts in self._data.contexts_by_lineno(str(COPY / file)).items()
            if (tests := self._tests(contexts))
        }

    def _tests(self, contexts: list[str]) -> list[str]:
        found: set[str] = set()
        for context in contexts:
            name = context.rpartition("|")[2]
            name = name.rpartition(" (")[0] if name.endswith((" (setup)", " (call)", " (teardown)")) else name
            found.update(self._users.get(name, [name]))
        return sorted(found & self.seconds.keys(), key=lambda test: (self.seconds[test], test))


def copy_checkout() -> str:
    """Copy the files of the checkout. Returns a hash of their contents."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    shutil.rmtree(COPY, ignore_errors=True)
    contents = hashlib.sha256()
    for name in sorted(filter(None, names)):
        if (ROOT / name).is_file():
            (COPY / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, COPY / name)
            contents.update(name.encode() + b"\0" + (ROOT / name).read_bytes())
    return contents.hexdigest()


def run_pytest(*options: str, seconds: float | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the tests of the copy."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.architecture.mutate", "-p", "no:cacheprovider"]
    command += ["--numprocesses", "2", "--dist", "worksteal", *options]
    environment = {**os.environ, "PYTHONPATH": str(COPY), "OMP_NUM_THREADS": "1", **environment}
    process = subprocess.Popen(
        command, cwd=COPY, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    with contextlib.ExitStack() as stack:
        stack.callback(process.kill)
        output, _ = process.communicate(timeout=seconds)
    return subprocess.CompletedProcess(command, process.returncode, output, "")


def collect(contents: str) -> None:
    """Run the default tests with coverage, unless this was done for the same contents."""
    folder, stamp = BUILD / "default", BUILD / "default" / "contents"
    if stamp.exists() and stamp.read_text() == contents:
        return
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "parts").mkdir(parents=True)
    (folder / "settings").write_text(SETTINGS.format(copy=COPY, folder=folder))
    settings = {"COVERAGE_PROCESS_START": str(folder / "settings"), FOLDER: str(folder)}
    done = run_pytest("-m", DEFAULT, "--timeout", "3600", **settings)
    (folder / "output").write_text(done.stdout)
    data = coverage.CoverageData(str(folder / "coverage"))
    for part in (folder / "parts").iterdir():
        with contextlib.suppress(coverage.exceptions.CoverageException):  # of a killed process
            found = coverage.CoverageData(str(part))
            found.read()
            data.update(found)
    data.write()
    shutil.rmtree(folder / "parts")
    stamp.write_text(contents)


# Mutants.


class Mutant(NamedTuple):
    """Broken source of a file."""

    file: str
    line: int
    what: str
    source: str


OFF_BY_ONE = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
SWAPPED = (ast.Sub, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow, ast.MatMult)
DROPPED = (ast.Expr, ast.AugAssign, ast.Raise, ast.Delete)


def mutants(file: str, source: str) -> list[Mutant]:
    """Return all mutants of the functions in a source. Messages, docstrings and annotations do not change."""
    found: list[Mutant] = []
    for function in ast.walk(ast.parse(source)):
        if isinstance(function, ast.FunctionDef) and function.name not in ("__repr__", "__str__"):
            for statement in function.body:
                for node in _changeable(statement):
                    for what, changed in _changes(node):
                        found.append(Mutant(file, node.lineno, what, _replaced(source, node, changed)))
    return found


def _changeable(node: ast.AST) -> Iterator[Any]:
    """Yield a node and all nodes in it, except nested functions, messages and annotations."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.JoinedStr, ast.Import, ast.ImportFrom)):
        return
    if isinstance(node, ast.Call) and ast.unparse(node.func).startswith(("logger.", "warnings.")):
        return
    yield node
    if isinstance(node, (ast.Raise, ast.Assert)):
        return
    for name, value in ast.iter_fields(node):
        if name not in ("annotation", "msg"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from _changeable(child)


def _changes(node: Any) -> Iterator[tuple[str, ast.AST]]:
    """Yield the ways to break a node itself."""
    changed = copy.deepcopy(node)
    if isinstance(node, (ast.If, ast.While, ast.IfExp)):
        changed.test = ast.UnaryOp(ast.Not(), node.test)
        yield "negated condition", changed
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        changed.value += 1
        yield "off by one", changed
    elif isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in OFF_BY_ONE:
        changed.ops = [OFF_BY_ONE[type(node.ops[0])]()]
        yield "off by one", changed
    elif isinstance(node, ast.BinOp) and isinstance(node.op, SWAPPED) and not isinstance(node.left, ast.Constant):
        changed.left, changed.right = node.right, node.left
        yield "swapped operands", changed
    elif isinstance(node, ast.Assign):
        if isinstance(node.targets[0], (ast.Attribute, ast.Subscript)):
            yield "dropped statement", ast.Pass()
    elif isinstance(node, DROPPED) and not _is_docstring(node):
        yield "dropped statement", ast.Pass()


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _replaced(source: str, node: Any, changed: ast.AST) -> str:
    """Return the source with another node."""
    if isinstance(node, (ast.If, ast.While)):  # only the condition changes
        node, changed = node.test, changed.test  # type: ignore[attr-defined]
    text, lines = ast.unparse(ast.fix_missing_locations(changed)), source.encode().splitlines(keepends=True)
    more = "\n" * (node.end_lineno - node.lineno)  # so that other lines keep their numbers
    text = f"({text}{more})" if isinstance(node, ast.expr) else text + more
    before, after = lines[node.lineno - 1][: node.col_offset], lines[node.end_lineno - 1][node.end_col_offset :]
    changed_lines = [*lines[: node.lineno - 1], before + text.encode() + after, *lines[node.end_lineno :]]
    return b"".join(changed_lines).decode()


def draw(tests: Tests, seed: int, count: int) -> list[Mutant]:
    """Draw mutants of executed lines, at least one of each subpackage, the others in proportion to executed lines."""
    chance, lines = random.Random(seed), collections.defaultdict[str, list[tuple[str, int]]](list)
    for file in tests.files():
        name = file.split("/")[1].removesuffix(".py") if file.count("/") > 1 else "rein"
        lines[name] += [(file, line) for line in sorted(tests.lines(file))]
    shares = {name: 1 for name in chance.sample(sorted(lines), min(count, len(lines)))}
    while sum(shares.values()) < count:
        shares[max(shares, key=lambda name: len(lines[name]) / shares[name])] += 1
    sources = {
        file: mutants(file, (COPY / file).read_text(encoding="utf-8"))
        for file in {f for ls in lines.values() for f, _ in ls}
    }
    drawn: list[Mutant] = []
    for name, share in sorted(shares.items()):
        chance.shuffle(lines[name])
        possible = ([m for m in sources[file] if m.line == line] for file, line in lines[name])
        chosen = (chance.choice(found) for found in possible if found)
        drawn += [mutant for _, mutant in zip(range(share), chosen, strict=False)]
    return drawn


def survives(marker: str, tests: list[str]) -> tuple[str, float]:
    """Run default tests, or all slow tests in their files. Returns the result and the seconds."""
    began, files = time.monotonic(), sorted({test.partition("::")[0] for test in tests})
    environment = {}
    if marker == DEFAULT:
        (BUILD / "selected.json").write_text(json.dumps(tests))
        environment = {SELECTED: str(BUILD / "selected.json")}
    try:
        done = run_pytest("-x", "-m", marker, "--timeout", "120", *files, seconds=SECONDS, **environment)
    except subprocess.TimeoutExpired:
        return f"survived for {SECONDS} s", SECONDS
    killers = [line for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    killed = killers[0].split(" ")[1].partition("[")[0] if killers else f"exit status {done.returncode}"
    survived = done.returncode in (0, pytest.ExitCode.NO_TESTS_COLLECTED)
    return ("survived" if survived else killed), time.monotonic() - began


def check(mutant: Mutant, tests: Tests) -> dict[str, tuple[str, float]]:
    """Run the default tests of a mutant and, if it survives, slow ones. Returns the results by marker."""
    path, results, selected = COPY / mutant.file, {}, tests.lines(mutant.file)[mutant.line]
    original = path.read_text(encoding="utf-8")
    path.write_text(mutant.source, encoding="utf-8")
    try:
        for marker in (DEFAULT, SLOW):
            results[marker] = survives(marker, selected)
            if is_killed(results[marker]):
                break
    finally:
        path.write_text(original, encoding="utf-8")
    return results


def is_killed(result: tuple[str, float] | None) -> bool:
    """Return whether tests noticed a mutant."""
    return result is not None and not result[0].startswith("survived")


def main() -> None:
    """Print a table of mutants and the share of them that the default tests kill."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="seed of the drawn lines")
    parser.add_argument("--count", type=int, default=20, help="number of mutants")
    options = parser.parse_args()
    collect(copy_checkout())
    tests, killed = Tests(), {DEFAULT: 0, SLOW: 0}
    print("| line | mutation | default tests | slow tests | s |\n|---|---|---|---|---|")
    for mutant in draw(tests, options.seed, options.count):
        results = check(mutant, tests)
        shown = " | ".join(results[marker][0] if marker in results else "" for marker in killed)
        seconds = sum(seconds for _, seconds in results.values())
        print(f"| {mutant.file}:{mutant.line} | {mutant.what} | {shown} | {seconds:.0f} |", flush=True)
        for marker in killed:
            killed[marker] += is_killed(results.get(marker))
    print(f"\nseed {options.seed}: the default tests killed {killed[DEFAULT]} of {sum(killed.values())} killed mutants")


if __name__ == "__main__":
    main()
