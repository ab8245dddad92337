"""Every example runs to its end as its reader would run it, with warnings being errors; its parts keep contracts."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rein.envs.cartpole import CartPole
from rein.testing import AgentContract

FOLDER = Path(__file__).parents[1] / "examples"
EXAMPLES = sorted(FOLDER.glob("*.py"))


@pytest.mark.parametrize("example", EXAMPLES, ids=[path.stem for path in EXAMPLES])
def test_the_example_runs(example: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", str(example)]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


class TestOwnAgent(AgentContract):
    """That of `examples/own_agent.py`, to which docs/parts.md leads whoever writes one."""

    def make(self, seed: int | None) -> Any:
        environment = CartPole(num_envs=1)
        agent = runpy.run_path(str(FOLDER / "own_agent.py"))["ActorCritic"]
        return agent(environment.single_observation_space, environment.single_action_space, seed=seed)

    def environment(self, num_envs: int, seed: int) -> CartPole:
        return CartPole(num_envs, seed=seed, max_episode_steps=20)


class TestOwnReplay(AgentContract):
    """That of `examples/own_replay.py`, as docs/parts.md shows it."""

    def make(self, seed: int | None) -> Any:
        environment = CartPole(num_envs=1)
        agent = runpy.run_path(str(FOLDER / "own_replay.py"))["Remembering"]
        return agent(
            environment.single_observation_space, environment.single_action_space, seed=seed, learning_starts=100
        )

    def environment(self, num_envs: int, seed: int) -> CartPole:
        return CartPole(num_envs, seed=seed, max_episode_steps=20)

    def learned(self, agent: Any) -> Any:
        return dict(agent.network.state_dict())

    def test_the_page_shows_what_it_does(self) -> None:
        page = (FOLDER.parent / "docs" / "parts.md").read_text(encoding="utf-8")
        (shown,) = re.findall(r"^```python\n(def record_observation.*?)^```$", page, re.MULTILINE | re.DOTALL)
        there = (FOLDER / "own_replay.py").read_text(encoding="utf-8")
        shown, there = (" ".join(text.split()) for text in (shown, there))  # the page's stand in no class
        assert shown in there
