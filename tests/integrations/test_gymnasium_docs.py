"""Tests that the code of `docs/reference/gymnasium.md` runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from rein.envs.gymnasium import GymnasiumEnvironment

PAGE = (Path(__file__).parents[2] / "docs/reference/gymnasium.md").read_text(encoding="utf-8")


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork:DeprecationWarning")
def test_documentation_examples_run() -> None:
    program = "\n".join(re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))
    names: dict[str, object] = {}
    exec(compile(program, "docs/reference/gymnasium.md", "exec"), names)
    for name, shape in (("native", (1024, 4)), ("custom", (4,))):
        environment = names[name]
        observation = environment.reset()  # type: ignore[attr-defined]  # the page's
        assert isinstance(observation, torch.Tensor)
        assert observation.shape == shape
        environment.close()  # type: ignore[attr-defined]  # the page's
    epochs = names["final"].history  # type: ignore[attr-defined]  # the page's
    assert len(epochs) == 3
    for epoch in epochs:  # the return of a FrozenLake episode is 1 if it succeeds
        assert 0.0 < epoch.metrics["success_rate"] < 1.0
        assert epoch.metrics["success_rate"] == pytest.approx(epoch.metrics["episode_return"])


def test_human_render_mode_opens_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    environment = GymnasiumEnvironment("CartPole-v1", num_envs=1, seed=0, render_mode="human")
    environment.reset()
    environment.apply_action(torch.ones(1, dtype=torch.int64))
    assert environment._transport.simulators[0].unwrapped.screen is not None  # type: ignore[attr-defined]  # CartPole's window
    environment.close()
