"""The README does what it says: its Python runs from top to bottom, its shell commands exist with their options."""

from __future__ import annotations

import itertools
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
FENCE = re.compile(r"^```(\w+)[^\n]*\n(.*?)^```\s*$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`((?:make|(?:[.\w/]+/)?rein|python\S* -m rein) [^`\n]+)`")


def blocks(*languages: str) -> list[tuple[int, str]]:
    """The fenced blocks of a language, each with the number of its first line."""
    found = (match for match in FENCE.finditer(README) if match[1] in languages)
    return [(README.count("\n", 0, match.start(2)) + 1, match[2]) for match in found]


def commands() -> list[list[str]]:
    """The words of every `make` and `rein` command, in shell blocks and in the text."""
    lines = [
        line.removeprefix("$ ") for _, text in blocks("sh", "bash", "shell", "console") for line in text.splitlines()
    ]
    found = [command_of(shlex.split(line, comments=True)) for line in lines + INLINE.findall(FENCE.sub("", README))]
    return [words for words in found if words[:1] in (["make"], ["rein"])]


def command_of(words: list[str]) -> list[str]:
    """The command without the variables set before it, the folder it lies in, and `python -m`."""
    words = list(itertools.dropwhile(lambda word: re.match(r"[A-Z_]+=", word), words))
    words = words[2:] if words[1:3] == ["-m", "rein"] else words
    return [Path(words[0]).name, *words[1:]] if words else []


def program(first_line: int, block: str) -> str:
    """A statement that runs the block under the README's own line numbers, so that a traceback points there."""
    return f"exec(compile({chr(10) * (first_line - 1) + block!r}, 'README.md', 'exec'), session)\n"


def test_the_python_of_the_readme_runs_in_order(tmp_path: Path) -> None:
    python = blocks("python")
    assert python
    session = tmp_path / "session.py"
    session.write_text("session = {'__name__': '__main__'}\n" + "".join(program(*block) for block in python))
    (tmp_path / "cwd").mkdir()
    command = [sys.executable, "-W", "error", str(session)]
    result = subprocess.run(command, cwd=tmp_path / "cwd", capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_make_targets_of_the_readme_exist() -> None:
    asked = {target for name, *targets in commands() if name == "make" for target in targets}
    assert {"demo", "test"} <= asked
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert asked <= set(re.findall(r"^([a-z-]+):(?!=)", makefile, re.MULTILINE))


def table_rows(text: str, columns: int) -> list[list[str]]:
    """The cells of every row of tables of so many columns, without their heads."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    return [row for row in rows if len(row) == columns and not set(row[0]) <= {"-"}][1:]


def test_the_results_of_the_readme_are_those_of_the_whole_table() -> None:
    whole = (ROOT / "docs/project/results.md").read_text(encoding="utf-8")
    known = {
        (what, target, runs, score.split(" ")[0], env_steps, seconds)
        for what, target, runs, score, _, env_steps, seconds in table_rows(whole, 7)
    }
    told = {tuple(row) for row in table_rows(README, 6)}
    assert len(told) > 5
    assert told - known == set()


@pytest.mark.parametrize("line", sorted({shlex.join(words) for words in commands() if words[0] == "rein"}))
def test_the_rein_command_of_the_readme_exists(line: str) -> None:
    words = shlex.split(line)[1:]
    options = [word.partition("=")[0] for word in words if word.startswith("--")]
    before_options = words[: next((i for i, word in enumerate(words) if word.startswith("--")), len(words))]
    command = [sys.executable, "-m", "rein", *before_options, "--help"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert [option for option in options if option not in result.stdout] == []
