"""The programs that the pages on agents are made of run, and every agent has its line there."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest

from rein.agents.base.options import options_of
from rein.agents.base.replay_agent import ReplayAgent
from rein.training.saved_agents import own_agents

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/algorithms/agents.md").read_text(encoding="utf-8")


def test_the_examples_are_one_program_that_runs() -> None:
    program = "\n".join(re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))
    names: dict[str, object] = {}
    exec(compile(program, "docs/algorithms/agents.md", "exec"), names)
    agent = names["agent"]
    assert agent.updates == 5 * 4 * 4  # type: ignore[attr-defined]  # epochs, passes and minibatches of the last example


def test_the_examples_of_learning_from_replay_are_one_program_that_runs() -> None:
    page = (ROOT / "docs/algorithms/replay.md").read_text(encoding="utf-8")
    program = "\n".join(re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL))
    names: dict[str, object] = {}
    exec(compile(program, "docs/algorithms/replay.md", "exec"), names)
    assert names["agent"].updates == (8 * 200 - 200) * 0.25  # type: ignore[attr-defined]  # the page's agent


def test_every_agent_has_a_line() -> None:
    modules = {path.stem for path in (ROOT / "rein/agents").glob("*.py")} - {"__init__"}
    assert modules == set(re.findall(r"^\| `rein\.agents\.(\w+)\.", PAGE, re.MULTILINE))


def test_the_page_on_replay_names_the_metrics_that_agents_report() -> None:
    page = (ROOT / "docs/algorithms/replay.md").read_text(encoding="utf-8")
    table = page.split("## What they report")[1].split("##")[0]
    said = {
        agent: tuple(re.findall(r"`(\w+)`", metrics.split(";")[0]))
        for agents, metrics in re.findall(r"^\| ([A-Z][\w, ]+) \| (.*) \|$", table, re.MULTILINE)
        for agent in agents.split(", ")
    }
    reported = {}
    for path in (ROOT / "rein/agents").glob("[a-z]*.py"):
        for kind in vars(importlib.import_module(f"rein.agents.{path.stem}")).values():
            if (
                isinstance(kind, type)
                and kind.__module__ == f"rein.agents.{path.stem}"
                and issubclass(kind, ReplayAgent)
            ):
                reported[kind.__name__] = kind.reports
    assert said == reported


@pytest.mark.parametrize("kind", own_agents().values(), ids=own_agents())
def test_the_docstring_of_an_agent_lists_every_option_with_its_default(kind: Any) -> None:
    _, _, listed = kind.__doc__.partition("Options:")
    entries = re.findall(r"^    (\w+): (.+)\. Default: (.+)$", listed, re.MULTILINE)
    assert [name for name, _, _ in entries] == list(options_of(kind))
    for name, _, default in entries:
        assert default == repr(options_of(kind)[name].default), name
