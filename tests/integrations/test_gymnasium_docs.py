"""The program that `docs/gymnasium.md` is made of runs."""

from __future__ import annotations

import re
from pathlib import Path

import torch

PAGE = (Path(__file__).parents[2] / "docs/gymnasium.md").read_text(encoding="utf-8")


def test_the_examples_are_one_program_that_runs() -> None:
    program = "\n".join(re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))
    names: dict[str, object] = {}
    exec(compile(program, "docs/gymnasium.md", "exec"), names)
    for name, shape in (("native", (1024, 4)), ("yours", (4,))):
        environment = names[name]
        observation = environment.reset()  # type: ignore[attr-defined]  # the page's
        assert isinstance(observation, torch.Tensor)
        assert observation.shape == shape
        environment.close()  # type: ignore[attr-defined]  # the page's
