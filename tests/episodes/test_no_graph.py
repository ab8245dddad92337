"""Acting builds no autograd graph; learning may."""

from __future__ import annotations

import pytest
import torch

import rein
from rein.loop.state import State
from rein.types import StepState


@pytest.fixture
def weighted(listening):
    """Agent class whose actions and extras depend on a parameter."""

    class Weighted(listening):
        def __init__(self, environment):
            super().__init__(environment)
            self.weight = torch.nn.Parameter(torch.ones(()))
            self.learned_with_gradients = []

        def select_action(self, observation):
            value_N = observation[:, 0] * self.weight
            return value_N, {"value": value_N}

        def optimize_model(self):
            self.learned_with_gradients.append(torch.is_grad_enabled())
            return super().optimize_model()

    return Weighted


def test_actions_and_extras_have_no_graph(scripted, weighted):
    environment = scripted([3])
    agent = weighted(environment)
    state = State(step_state=StepState(environment.reset()))
    for _ in range(2):
        state.step_state = rein.batch_step(state, agent, environment)
    for action, transition in zip(environment.actions, agent.transitions, strict=True):
        assert not action.requires_grad
        assert not transition.action.requires_grad
        assert not transition.extras["value"].requires_grad


def test_optimize_model_runs_with_gradients(scripted, weighted):
    environment = scripted([3])
    agent = weighted(environment)
    rein.batch_step(State(step_state=StepState(environment.reset())), agent, environment)
    assert agent.learned_with_gradients == [True]


def test_evaluation_has_no_graph(scripted, weighted):
    environment = scripted([3])
    rein.evaluate(weighted(environment), environment, 1)
    assert [action.requires_grad for action in environment.actions] == [False, False, False]
    assert torch.is_grad_enabled()
