"""The examples of docs/reference/recipes.md run as one program."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from rein.cli import main

PAGE = (Path(__file__).parents[2] / "docs/reference/recipes.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def test_examples_run_as_one_program(capsys):
    exec(compile("\n".join(EXAMPLES), "docs/reference/recipes.md", "exec"), {"__name__": "page"})
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "cartpole: there is no option lr; use learning_rate"
    assert float(lines[3]) == pytest.approx(0.005)


def test_custom_recipe_runs_from_the_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "my_recipes", raising=False)  # of another test
    module = next(example for example in EXAMPLES if "def short_poles" in example)
    (tmp_path / "my_recipes.py").write_text(module)
    main(["train", "my_recipes:short_poles", "--quiet", "--target", "30", "--num-envs", "8"])
    assert "solved: episode_return_100" in capsys.readouterr().out
    main(["resume", "runs/my_recipes-short_poles", "my_recipes:short_poles", "--epochs", "3", "--quiet"])
    main(["evaluate", "runs/my_recipes-short_poles", "--episodes", "2"])
    assert "episodes  2" in capsys.readouterr().out
