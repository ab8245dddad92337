"""The code of the README runs, and its shell commands exist with their options."""

from __future__ import annotations

import itertools
import re
import shlex
from pathlib import Path

import pytest

from tests import programs

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
FENCE = re.compile(r"^```(\w+)[^\n]*\n(.*?)^```\s*$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`((?:make|(?:[.\w/]+/)?rein|python\S* -m rein) [^`\n]+)`")


def blocks(*languages: str) -> list[tuple[int, str]]:
    """Return the fenced blocks in the given languages, each with the number of its first line."""
    found = (match for match in FENCE.finditer(README) if match[1] in languages)
    return [(README.count("\n", 0, match.start(2)) + 1, match[2]) for match in found]


def commands() -> list[list[str]]:
    """Return the words of each `make` and `rein` command in shell blocks and in the text."""
    lines = [
        line.removeprefix("$ ") for _, text in blocks("sh", "bash", "shell", "console") for line in text.splitlines()
    ]
    found = [command_of(shlex.split(line, comments=True)) for line in lines + INLINE.findall(FENCE.sub("", README))]
    return [words for words in found if words[:1] in (["make"], ["rein"])]


def command_of(words: list[str]) -> list[str]:
    """Return the command without assignments of variables, its folder and `python -m`."""
    words = list(itertools.dropwhile(lambda word: re.match(r"[A-Z_]+=", word), words))
    words = words[2:] if words[1:3] == ["-m", "rein"] else words
    return [Path(words[0]).name, *words[1:]] if words else []


def program(first_line: int, block: str) -> str:
    """Return a statement that runs the block with the line numbers of the README, for tracebacks."""
    return f"exec(compile({chr(10) * (first_line - 1) + block!r}, 'README.md', 'exec'), session)\n"


def run(statements: str, folder: Path) -> None:
    script = folder / "session.py"
    script.write_text("session = {'__name__': '__main__'}\n" + statements)
    (folder / "cwd").mkdir()
    programs.run("-W", "error", script, cwd=folder / "cwd")


@pytest.mark.slow
def test_python_blocks_run_in_order(tmp_path: Path) -> None:
    run("".join(program(*block) for block in blocks("python")), tmp_path)


@pytest.mark.parametrize("block", blocks("python"), ids=lambda block: f"line {block[0]}")
def test_python_block_runs_alone(block: tuple[int, str], tmp_path: Path) -> None:
    run(program(*block), tmp_path)


def test_make_targets_exist() -> None:
    targets = {target for name, *targets in commands() if name == "make" for target in targets}
    assert {"demo", "test"} <= targets
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert targets <= set(re.findall(r"^([a-z-]+):(?!=)", makefile, re.MULTILINE))


def table_rows(text: str, columns: int) -> list[list[str]]:
    """Return the cells of each row of the tables with `columns` columns, without their heads."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    return [row for row in rows if len(row) == columns and not set(row[0]) <= {"-"}][1:]


def test_results_equal_those_of_the_results_page() -> None:
    page = (ROOT / "docs/project/results.md").read_text(encoding="utf-8")
    known = {
        (task, target, runs, score.split(" ")[0], env_steps, seconds)
        for task, target, runs, score, _, env_steps, seconds in table_rows(page, 7)
    }
    shown = {tuple(row) for row in table_rows(README, 6)}
    assert len(shown) == 5
    assert shown - known == set()


@pytest.mark.parametrize("line", sorted({shlex.join(words) for words in commands() if words[0] == "rein"}))
def test_rein_command_exists(line: str) -> None:
    words = shlex.split(line)[1:]
    options = [word.partition("=")[0] for word in words if word.startswith("--")]
    before_options = words[: next((i for i, word in enumerate(words) if word.startswith("--")), len(words))]
    before_options += words[1:5] if words[1:2] == ["--env"] else []  # the agent has options, too
    shown = programs.run("-m", "rein", *before_options, "--help").stdout
    assert [option for option in options if option not in shown] == []
