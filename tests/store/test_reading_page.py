"""Run the examples of `docs/how_to/read_trajectories.md`."""

from __future__ import annotations

import re
from pathlib import Path

import rein
from rein.store import windows
from rein.store.reader import Run

PAGE = (Path(__file__).parents[2] / "docs/how_to/read_trajectories.md").read_text(encoding="utf-8")


def test_examples_run_as_one_program(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    program = "\n".join(re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))
    names: dict[str, object] = {}
    exec(compile(program, "docs/how_to/read_trajectories.md", "exec"), names)
    output = capsys.readouterr().out.splitlines()
    assert output[0].startswith("Run('runs/reading': 1 files, 4 epochs, ") and output[-1] == "False"
    assert isinstance(names["run"], Run) and isinstance(names["batch"], rein.Transition)


def test_names_and_numbers_on_the_page_are_correct():
    for name in re.findall(r"`run\.(?!json)(\w+)", PAGE):
        assert hasattr(Run, name), name
    assert f"up to {windows._SMALL >> 20} MiB" in PAGE
