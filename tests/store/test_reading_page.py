"""The program that `docs/how_to/read_trajectories.md` is made of runs."""

from __future__ import annotations

import re
from pathlib import Path

import rein
from rein.store import windows
from rein.store.reader import Run

PAGE = (Path(__file__).parents[2] / "docs/how_to/read_trajectories.md").read_text(encoding="utf-8")


def test_the_examples_are_one_program_that_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    program = "\n".join(re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))
    names: dict[str, object] = {}
    exec(compile(program, "docs/how_to/read_trajectories.md", "exec"), names)
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("Run('runs/reading': 1 files, 4 epochs, ") and said[-1] == "False"
    assert isinstance(names["run"], Run) and isinstance(names["batch"], rein.Transition)


def test_what_the_page_says_of_numbers_and_names_holds():
    for name in re.findall(r"`run\.(?!json)(\w+)", PAGE):
        assert hasattr(Run, name), name
    assert f"up to {windows._SMALL >> 20} MiB" in PAGE
