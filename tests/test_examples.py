"""Examples run without warnings, and their agents and environments pass the contract tests."""

from __future__ import annotations

import ast
import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest

import rein
from rein.agents import Agent
from rein.envs.cartpole import CartPole
from rein.schedules import linear
from rein.testing import AgentContract, EnvironmentContract
from rein.testing.stateful import copy_state, first_difference
from tests import programs

FOLDER = Path(__file__).parents[1] / "examples"
EXAMPLES = sorted(FOLDER.glob("*.py"))


@pytest.mark.default_cases("bare_for", "own_step", "resume", "shape_reward")
@pytest.mark.parametrize("example", EXAMPLES, ids=[path.stem for path in EXAMPLES])
def test_example_runs(example: Path, tmp_path: Path) -> None:
    programs.run("-W", "error", example, cwd=tmp_path)


def assert_resumes_exactly(parts: Callable[[], tuple[Any, Any, rein.Loop]]) -> None:
    """Compare an uninterrupted run with one that is interrupted half-way and loaded into new objects."""
    agent, _, loop = parts()
    loop.run(epochs=4, iterations=25)
    first, environment, interrupted = parts()
    interrupted.run(epochs=2, iterations=25)
    state = copy_state([interrupted.state_dict(), first.state_dict(), environment.state_dict()])
    resumed, environment, loop = parts()
    for part, saved in zip((loop, resumed, environment), state, strict=True):
        part.load_state_dict(saved)
    loop.run(epochs=4, iterations=25)
    assert first_difference(agent.state_dict(), resumed.state_dict()) is None


class CartPoleContract(AgentContract):
    """Contract of an agent of an example, on CartPole."""

    example: str
    options: ClassVar[dict[str, Any]] = {}

    def kind(self) -> Any:
        (agent,) = (
            value
            for value in runpy.run_path(str(FOLDER / f"{self.example}.py")).values()
            if isinstance(value, type) and issubclass(value, Agent) and value is not Agent
        )
        return agent

    def make(self, seed: int | None) -> Any:
        return self.kind()(CartPole(num_envs=1), seed=seed, **self.options)

    def environment(self, num_envs: int, seed: int) -> CartPole:
        return CartPole(num_envs, seed=seed, max_episode_steps=20)

    def test_resumed_run_equals_uninterrupted_run(self) -> None:
        def parts() -> Any:
            environment = CartPole(8, seed=0)
            agent = self.kind()(environment, seed=0, **self.options)
            return agent, environment, rein.training_loop(agent, environment, seed=0)

        assert_resumes_exactly(parts)

    def test_learning_rate_follows_schedule(self) -> None:
        options = {**self.options, "learning_rate": linear(1e-3, 0.0, updates=4)}
        agent = self.kind()(CartPole(8, seed=0), seed=0, **options)
        rates = []
        for _ in self._learning(agent):
            if len(rates) < agent.updates:
                rates.append(agent.optimizer.param_groups[0]["lr"])
        assert rates[:5] == pytest.approx([1e-3, 7.5e-4, 5e-4, 2.5e-4, 0.0])

    def test_class_is_short(self) -> None:
        tree = ast.parse((FOLDER / f"{self.example}.py").read_text(encoding="utf-8"))
        (kind,) = (node for node in tree.body if isinstance(node, ast.ClassDef))
        assert (kind.end_lineno or 0) - kind.lineno < 50


@pytest.mark.slow
class TestReinforce(CartPoleContract):
    example = "reinforce"
    options: ClassVar[dict[str, Any]] = {"rollout_steps": 8}


class TestOwnReplay(CartPoleContract):
    example = "own_replay"
    options: ClassVar[dict[str, Any]] = {"learning_starts": 100, "batch_size": 16}


CHASE = runpy.run_path(str(FOLDER / "multi_agent.py"))["Chase"]


class TestMultiAgent(EnvironmentContract):
    steps = 20

    def make(self, num_envs: int, seed: int | None) -> Any:
        return CHASE(num_envs, seed=seed, max_episode_steps=9)


CART = runpy.run_path(str(FOLDER / "own_environment.py"))["Cart"]


class TestOwnEnvironment(EnvironmentContract):
    def make(self, num_envs: int, seed: int | None) -> Any:
        return CART(num_envs, seed=seed, power=30.0, max_episode_steps=9)

    def test_resumed_run_equals_uninterrupted_run(self) -> None:
        def parts() -> Any:
            environment = CART(8, seed=0, max_episode_steps=20)
            agent = rein.PPO(environment, seed=0, rollout_steps=8)
            return agent, environment, rein.training_loop(agent, environment, seed=0)

        assert_resumes_exactly(parts)

    @pytest.mark.slow
    def test_ppo_learns_environment(self, capsys: pytest.CaptureFixture[str]) -> None:
        runpy.run_path(str(FOLDER / "own_environment.py"), run_name="__main__")
        before, after = (float(number) for number in re.findall(r"-\d+\.\d", capsys.readouterr().out))
        assert after > before / 2

    def test_class_is_short(self) -> None:
        tree = ast.parse((FOLDER / "own_environment.py").read_text(encoding="utf-8"))
        (kind,) = (node for node in tree.body if isinstance(node, ast.ClassDef))
        assert len(ast.unparse(kind).splitlines()) <= 35

    def test_documentation_shows_example(self) -> None:
        page = (FOLDER.parent / "docs/reference/environments.md").read_text(encoding="utf-8")
        (shown,) = (
            block for block in re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S) if "class Cart" in block
        )
        assert shown.strip() in (FOLDER / "own_environment.py").read_text(encoding="utf-8")
