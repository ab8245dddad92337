"""Training is bit-identical with and without evaluation, for every agent."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

import rein
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
            return TOOLS["make_agent"](TOOLS["agents"]()[name], environment), environment, make_environment
        except ValueError:  # other spaces
            environment.close()
    raise AssertionError(f"{name} supports no environment")


def trained(name: str, background: bool | None) -> tuple[Any, list[Any]]:
    """Train an agent for three epochs, evaluated unless `background` is None. Returns its state and all results."""
    agent, environment, make_environment = parts_of(name)
    loop, found = rein.training_loop(agent, environment, epochs=3, iterations=12), []
    if background is not None:
        options = {"episodes": 3, "max_episode_steps": 20, "background": background}
        evaluate_every(loop, agent.policy(deterministic=False), make_environment(4), **options)
        found = results(loop)
    loop.run()
    assert agent.updates > 0 or not agent.learners
    return loop.parts["agent"].state_dict(), found


def check_unchanged(name: str, background: bool) -> list[Any]:
    (state, _), (evaluated, found) = trained(name, None), trained(name, background)
    for (path, expected), (_, value) in zip(leaves(state), leaves(evaluated), strict=True):
        same = torch.equal(expected, value) if isinstance(expected, torch.Tensor) else expected == value
        assert same, path
    assert [epoch for epoch, *_ in found] == [1, 2, 3]
    return found


@pytest.mark.parametrize("name", AGENTS)
def test_evaluation_does_not_change_training(name: str) -> None:
    check_unchanged(name, background=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", AGENTS)
def test_background_evaluation_does_not_change_training(name: str) -> None:
    assert check_unchanged(name, background=True) == trained(name, False)[1]
