"""Tests of `docs/reference/wrappers.md`: its code runs, and it lists every wrapper."""

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
    """Names that the code of the page defines."""
    monkeypatch.chdir(tmp_path)
    program = "\n".join(re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))
    names: dict[str, Any] = {}
    exec(compile(program, "docs/reference/wrappers.md", "exec"), names)
    return names


def test_documented_examples_have_the_documented_shapes(names: dict[str, Any]) -> None:
    assert names["stacked"].reset().shape == (16, 4, 4)
    assert names["flat"].reset().shape == (16, 20)
    assert names["history"].reset().shape == (16, 8, 20)
    assert names["rescaled"].inner.single_action_space.high.tolist() == [2.0]
    assert names["limited"].reset().shape == (16, 7)
    for name in ("rescaled", "clipped", "scaled", "clipped_reward", "sign", "filmed"):
        names[name].reset()


def test_documented_custom_wrapper_adds_its_bonus(names: dict[str, Any]) -> None:
    plain, paid = rein.envs.Gridworld(4, seed=0), names["Bonus"](rein.envs.Gridworld(4, seed=0), 2.0)
    plain.reset()
    paid.reset()
    one, other = (environment.apply_action(torch.zeros(4, dtype=torch.int64)) for environment in (plain, paid))
    assert torch.equal(one.reward + 2.0, other.reward)
    assert paid.config["bonus"] == 2.0


def test_documentation_lists_every_wrapper() -> None:
    (shown,) = re.findall(r"^from rein\.envs\.wrappers import \((.*?)\)", PAGE, re.MULTILINE | re.DOTALL)
    assert shown.replace(",", " ").split() == rein.envs.wrappers.__all__
