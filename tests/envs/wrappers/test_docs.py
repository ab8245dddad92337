"""The program that `docs/reference/wrappers.md` is made of runs, and every wrapper has its place there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import rein

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/reference/wrappers.md").read_text(encoding="utf-8")


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the program of the page has defined when it has run."""
    monkeypatch.chdir(tmp_path)
    program = "\n".join(re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))
    names: dict[str, Any] = {}
    exec(compile(program, "docs/reference/wrappers.md", "exec"), names)
    return names


def test_the_examples_give_what_the_page_says(names: dict[str, Any]) -> None:
    assert names["stacked"].reset().shape == (16, 4, 4)
    assert names["flat"].reset().shape == (16, 20)
    assert names["history"].reset().shape == (16, 8, 20)
    assert names["rescaled"].inner.single_action_space.high.tolist() == [2.0]
    assert names["limited"].reset().shape == (16, 7)
    for name in ("rescaled", "clipped", "scaled", "clipped_reward", "sign", "filmed"):
        names[name].reset()


def test_your_own_wrapper_pays_its_bonus(names: dict[str, Any]) -> None:
    plain, paid = rein.envs.Gridworld(4, seed=0), names["Bonus"](rein.envs.Gridworld(4, seed=0), 2.0)
    plain.reset()
    paid.reset()
    one, other = (environment.apply_action(torch.zeros(4, dtype=torch.int64)) for environment in (plain, paid))
    assert torch.equal(one.reward + 2.0, other.reward)
    assert paid.config["bonus"] == 2.0


def test_every_wrapper_is_shown() -> None:
    (shown,) = re.findall(r"^from rein\.envs\.wrappers import \((.*?)\)", PAGE, re.MULTILINE | re.DOTALL)
    assert shown.replace(",", " ").split() == rein.envs.wrappers.__all__
