"""Training is bit-identical with and without evaluation, loggers and panel, for every agent."""

from __future__ import annotations

import io
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import rein
from rein.handlers import loggers
from rein.handlers.evaluate_every import evaluate_every
from rein.loop.state import State
from rein.ops.trees import leaves

TOOLS = runpy.run_path(str(Path(__file__).parents[1] / "faults/cases.py"))
AGENTS = [name for name in TOOLS["agents"]() if not name.endswith("_prioritized")]


def results(loop: rein.Loop) -> list[Any]:
    """Return a list that collects epoch and returns of each evaluation."""
    found: list[Any] = []

    @loop.evaluation_completed
    def note(state: State) -> None:
        found.append((state.evaluation.epoch, state.evaluation.result.episode_return.tolist()))

    return found


def parts_of(name: str) -> tuple[Any, Any, Any]:
    """Return an agent, its environment and the function that makes environments, the first that the agent supports."""
    for make_environment in TOOLS["ENVIRONMENTS"].values():
        environment = make_environment(3)
        try:
            return TOOLS["make_agent"](name, environment), environment, make_environment
        except ValueError:  # other spaces
            environment.close()
    raise AssertionError(f"{name} supports no environment")


def trained(
    name: str, background: bool | None, observe: Callable[[rein.Loop], None] = lambda loop: None
) -> tuple[Any, list[Any]]:
    """Train an agent for three epochs, evaluated unless `background` is None. Returns its state and all results."""
    agent, environment, make_environment = parts_of(name)
    loop, found = rein.training_loop(agent, environment, epochs=3, iterations=12), []
    observe(loop)
    if background is not None:
        options = {"episodes": 3, "max_episode_steps": 20, "background": background}
        evaluate_every(loop, agent.policy(deterministic=False), make_environment(4), **options)
        found = results(loop)
    loop.run()
    assert agent.updates > 0 or not agent.learners
    return loop.parts["agent"].state_dict(), found


def check_equal(state: Any, other: Any) -> None:
    for (path, expected), (_, value) in zip(leaves(state), leaves(other), strict=True):
        same = torch.equal(expected, value) if isinstance(expected, torch.Tensor) else expected == value
        assert same, path


def check_unchanged(name: str, background: bool) -> list[Any]:
    (state, _), (evaluated, found) = trained(name, None), trained(name, background)
    check_equal(state, evaluated)
    assert [epoch for epoch, *_ in found] == [1, 2, 3]
    return found


@pytest.mark.default_cases("population_ppo", "population_dqn", "a2c", "a2c_lstm", "dqn", "ppo", "q_learning", "sac")
@pytest.mark.parametrize("name", AGENTS)
def test_evaluation_does_not_change_training(name: str) -> None:
    check_unchanged(name, background=False)


@pytest.mark.default_cases("population_ppo", "a2c", "dqn", "q_learning")
@pytest.mark.parametrize("name", AGENTS)
def test_loggers_and_panel_do_not_change_training(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    for variable, value in {"TERM": "xterm", "COLUMNS": "100", "LINES": "40"}.items():
        monkeypatch.setenv(variable, value)

    def observe(loop: rein.Loop) -> None:
        rein.progress(loop, file=terminal)
        rein.log(loop)
        rein.timing(loop)
        loggers.attach(loop, loggers.CSVLogger(tmp_path / "metrics.csv"))
        loggers.attach(loop, loggers.TensorBoardLogger(tmp_path / "tensorboard"))
        loop.epoch_ended(lambda state: state.log("epoch", str(state.epoch)))

    check_equal(trained(name, None)[0], trained(name, None, observe)[0])
    assert "completed" in terminal.getvalue()
    assert len((tmp_path / "metrics.csv").read_text().splitlines()) == 4
    assert any((tmp_path / "tensorboard").iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in AGENTS if not name.startswith("population")])  # need one agent
def test_background_evaluation_does_not_change_training(name: str) -> None:
    assert check_unchanged(name, background=True) == trained(name, False)[1]
