"""Pages of docs/algorithms agree with the agents."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import rein
from rein.options import options_of
from rein.recipes.recipe import _document
from rein.training.saved_agents import own_agents

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs/algorithms"


def page_of(kind: type) -> str:
    module = kind.__module__.rpartition(".")[2]
    return (PAGES / f"{module.removeprefix('recurrent_')}.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("kind", own_agents().values(), ids=own_agents())
def test_every_agent_has_a_line_in_the_index_and_a_page_with_its_options(kind: type) -> None:
    assert f"| [`rein.{kind.__name__}`]" in (PAGES / "index.md").read_text(encoding="utf-8")
    assert f"{{options}} rein.{kind.__name__}\n" in page_of(kind)


@pytest.mark.parametrize("kind", own_agents().values(), ids=own_agents())
def test_page_of_an_agent_lists_its_metrics(kind: Any) -> None:
    _, _, section = page_of(kind).partition("## Metrics\n")
    listed = re.findall(r"^\| `(\w+)` \|", section.partition("\n## ")[0], re.MULTILINE)
    assert listed == list(kind.reports or ("td_error", "epsilon"))  # QLearning reports after every step


@pytest.mark.parametrize("kind", own_agents().values(), ids=own_agents())
def test_docstring_of_an_agent_lists_every_option_with_its_default(kind: Any) -> None:
    _, _, listed = kind.__doc__.partition("Options:")
    entries = re.findall(r"^    (\w+): (.+)\. Default: (.+)$", listed, re.MULTILINE)
    assert [name for name, _, _ in entries] == list(options_of(kind))
    for name, _, default in entries:
        assert default == repr(options_of(kind)[name].default), name


def test_option_without_help_keeps_its_check_and_inherits_the_rest() -> None:
    class Minimal(rein.PPO):
        """Agent with a new option and another default."""

        horizon: int = rein.option(default=3, check=rein.options.at_least_one)
        gamma: float = rein.option(default=0.5)

    assert re.findall(r"^    (?:horizon|gamma).*", Minimal.__doc__ or "", re.MULTILINE) == [
        "    horizon: Default: 3",
        "    gamma: discount factor. Default: 0.5",
    ]
    assert "horizon: option of the agent." in _document("Recipe.", ["horizon"], Minimal, None)
    environment = rein.envs.CartPole(1)
    for invalid in (lambda: Minimal(environment, horizon=0), lambda: Minimal(environment, gamma=2.0)):
        with pytest.raises(ValueError, match="give"):
            invalid()
