"""The programs that the pages on agents are made of run, and every agent has its line there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/agents.md").read_text(encoding="utf-8")


def test_the_examples_are_one_program_that_runs() -> None:
    program = "\n".join(re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))
    names: dict[str, object] = {}
    exec(compile(program, "docs/agents.md", "exec"), names)
    agent = names["agent"]
    assert agent.updates == 5 * 4 * 4  # type: ignore[attr-defined]  # epochs, passes and minibatches of the last example


def test_the_examples_of_learning_from_replay_are_one_program_that_runs() -> None:
    page = (ROOT / "docs/off_policy.md").read_text(encoding="utf-8")
    program = "\n".join(re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL))
    names: dict[str, object] = {}
    exec(compile(program, "docs/off_policy.md", "exec"), names)
    assert names["agent"].updates == (8 * 200 - 200) * 0.25  # type: ignore[attr-defined]  # the page's agent


def test_every_agent_has_a_line() -> None:
    modules = {path.stem for path in (ROOT / "rein/agents").glob("*.py")} - {"__init__"}
    assert modules == set(re.findall(r"^\| `rein\.agents\.(\w+)\.", PAGE, re.MULTILINE))


def test_every_option_that_agents_share_has_its_comment() -> None:
    source = (ROOT / "rein/learning/options.py").read_text(encoding="utf-8")
    listed = source[source.index("class OnPolicyOptions") : source.index("# which of them")]
    options = [line for line in listed.splitlines() if re.match(r"    \w+: ", line)]
    assert options
    assert not [line for line in options if "  # " not in line]
